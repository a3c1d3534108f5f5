"""The tokenizer: text to token ids and back, for byte-level BPE."""

import json
from codecs import getincrementaldecoder
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as TokenizerFile

from gateway.errors import ModelFolderError


class Tokenizer:
    """A model's tokenizer.

    Encoding never makes a special token out of text: what a client writes is text, even where it
    looks like the end of a turn. Decoding leaves special tokens out.
    """

    def __init__(self, file: TokenizerFile) -> None:
        file.no_truncation()
        file.no_padding()
        file.encode_special_tokens = True  # the library's name for "as the plain text they are"
        self._file = file
        self._special = {
            token.content: token_id
            for token_id, token in file.get_added_tokens_decoder().items()
            if token.special
        }
        self._bytes = _bytes_by_id(file, special=set(self._special.values()))
        self.longest_token_bytes = max(map(len, self._bytes.values()))

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read `tokenizer.json` of a model folder.

        Raises ModelFolderError if it is missing, damaged, or not byte-level.
        """
        path = model_dir / "tokenizer.json"
        try:
            definition = path.read_text(encoding="utf-8")
            decoder = json.loads(definition)["decoder"]
            file = TokenizerFile.from_str(definition)
        except Exception as error:  # the library raises no narrower class
            problem = f"the tokenizer cannot be read ({error})"
            raise ModelFolderError(path, problem, cure="fetch the model again") from error
        if decoder is None or decoder["type"] != "ByteLevel":
            problem = "the tokenizer is not byte-level BPE, the only kind served yet"
            raise ModelFolderError(path, problem, cure="choose another model")
        return cls(file)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        ids: list[int] = self._file.encode(text, add_special_tokens=False).ids
        return ids

    def special_id(self, token: str) -> int:
        """The id of a special token. Raises KeyError if there is none of this name."""
        return self._special[token]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these tokens; bytes that are not UTF-8 become replacement characters."""
        return self._join(ids).decode(errors="replace")

    def detokenizer(self) -> "Detokenizer":
        """A fresh incremental decoder."""
        return Detokenizer(self)

    def _join(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes.get(token_id, b"") for token_id in ids)


class Detokenizer:
    """Decodes as tokens arrive; all its pieces joined equal the decoding of all the tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; a character begun is held back."""
        return self._decoder.decode(self._tokenizer._join(ids))

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        return self._decoder.decode(b"", final=True)


def _bytes_by_id(file: TokenizerFile, *, special: set[int]) -> dict[int, bytes]:
    """What each token stands for; a special token for nothing."""
    byte_of = _byte_by_character()
    table = {}
    for token, token_id in file.get_vocab(with_added_tokens=True).items():
        if token_id in special:
            table[token_id] = b""
        elif all(character in byte_of for character in token):
            table[token_id] = bytes(byte_of[character] for character in token)
        else:  # an added token is written as itself
            table[token_id] = token.encode()
    return table


def _byte_by_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: a printable Latin-1 byte as itself, the others from U+0100 on.

    Source: GPT-2's encoder.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
