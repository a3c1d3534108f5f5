"""The house rules that no linter knows. Each failure names the file, the line and the cure."""

import ast
import builtins
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from gateway.settings import Settings

ROOT = Path(__file__).parents[1]
PACKAGES = ("gateway", "engine", "billing", "migrations")
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Far above the usual file: a limit is for the file that was never split, not a target.
MOST_LINES, MOST_TEST_LINES, MOST_FUNCTION_LINES = 400, 600, 60


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def source_files() -> list[Path]:
    """The packages' own Python and C."""
    c_files = [path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.[ch]"))]
    return python_files(*PACKAGES) + c_files


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_readme_tree_is_the_files_with_their_first_lines() -> None:
    tree = README.split("## Where things are")[1].split("```")[1]
    told, folder = {}, ""
    for line in tree.splitlines():
        if match := re.match(r"  (\S+\.(?:py|c|h)) +(.+)", line):
            told[folder + match[1]] = match[2]
        elif match := re.match(r"(\S+/)", line):
            folder = match[1]
    true = {shown(path): first_line(path) for path in source_files() if path.name != "__init__.py"}

    assert told == true, "copy the docstring's first line to README.md, 'Where things are'"


def first_line(path: Path) -> str:
    if path.suffix != ".py":
        line = path.read_text(encoding="utf-8").splitlines()[0]
        assert line.startswith("// "), f"{shown(path)} says nothing about itself"
        return line.removeprefix("// ").removesuffix(".")
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{shown(path)} says nothing about itself"
    return docstring.splitlines()[0].removesuffix(".")


def test_no_file_is_longer_than_a_sitting() -> None:
    limits = [(path, MOST_LINES) for path in [*source_files(), *python_files("bench")]]
    limits += [(path, MOST_TEST_LINES) for path in python_files("tests")]

    long = [shown(path) for path, most in limits if len(path.read_text().splitlines()) > most]

    assert not long, "split the file by noun"


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{shown(path)}:{node.lineno} {node.name}"
        for path in python_files(*PACKAGES, "bench")
        for node in functions(path)
        if (node.end_lineno or node.lineno) - node.lineno + 1 > MOST_FUNCTION_LINES
    ]

    assert not long, "name a step of it and move it below"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_billing_counts_in_integers() -> None:
    inexact = [
        f"{shown(path)}:{node.lineno}"
        for path in python_files("billing")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.expr | ast.AugAssign) and is_inexact(node)
    ]

    assert not inexact, "money and tokens are integers; divide with // in billing/money.py"


def is_inexact(node: ast.expr | ast.AugAssign) -> bool:
    match node:
        case ast.Constant(value=float()) | ast.Name(id="float" | "Decimal"):
            return True
        case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
            return True
    return False


def test_every_setting_is_in_the_readme() -> None:
    table = README.split("## Settings")[1]
    read = {
        name
        for path in python_files(*PACKAGES)
        for name in re.findall(r"KVMETER_[A-Z0-9]+(?:_[A-Z0-9]+)*", path.read_text("utf-8"))
    }
    declared = {
        f"KVMETER_{name.upper()}"
        for name, field in Settings.model_fields.items()
        if field.validation_alias is None
    }

    missing = {name for name in read | declared if f"`{name}`" not in table}

    assert not missing, "add the setting to README.md, 'Settings'"
    named = set(re.findall(r"`(KVMETER_[A-Z0-9_]+)`", table))
    assert named <= read | declared, "README.md names a setting that nothing reads"


def test_files_are_named_after_what_they_hold() -> None:
    shapeless = {"utils", "helpers", "common", "base", "manager", "misc"}

    assert not [shown(p) for p in python_files(*PACKAGES, "tests") if p.stem in shapeless]


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    left = [
        f"{shown(path)}:{number}"
        for path in python_files(*PACKAGES, "bench", "tests")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if marks.search(line)
    ]

    assert not left, "do it, or file an issue"


@pytest.mark.parametrize("module", ["gateway.commands", "gateway.app", "engine.client"])
def test_the_gateway_starts_without_torch(module: str) -> None:
    check = f"import sys, {module}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=False).returncode == 0


# What a machine that runs only the engine need not have.
ABSENT = (
    "gateway", "billing", "fastapi", "starlette", "uvicorn", "uvloop", "httptools", "httpx",
    "pydantic", "pydantic_settings", "orjson", "tokenizers", "prometheus_client", "typer", "rich",
    "sqlalchemy", "psycopg", "alembic", "anthropic", "transformers", "matplotlib",
)  # fmt: skip
ENGINE_ALONE = """
import importlib, pkgutil, sys
import pytest

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
engine = importlib.import_module("engine")
for module in pkgutil.walk_packages(engine.__path__, "engine."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
sys.exit(pytest.main(["--collect-only", "-q", "-q", "tests/engine"]))
"""


def test_the_engine_and_its_tests_need_only_the_engines_packages() -> None:
    command = [sys.executable, "-c", ENGINE_ALONE, *ABSENT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, f"move the test to tests/parity: {done.stdout}{done.stderr}"


def test_every_module_is_used() -> None:
    entry_points = {"gateway.commands", "engine.model_files.default_model", "migrations.env"}
    sources = {module_name(path): path.read_text("utf-8") for path in python_files(*PACKAGES)}
    imported = {
        name
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        for name in imported_names(node)
    }
    dead = [
        name
        for name in sources
        if name not in entry_points
        and name not in imported
        and not any(other.startswith(f"{name}.") for other in sources)
        and not name.startswith("migrations.versions.")
        and not name.endswith(".__main__")
    ]

    assert not dead, "remove the file, or use it"


def test_no_import_runs_in_a_circle() -> None:
    """Also those that run late, inside a function or by name."""
    trees = {
        module_name(path): ast.parse(path.read_text("utf-8"))
        for path in python_files(*PACKAGES, "bench")
    }
    imports = {
        name: {other for node in ast.walk(tree) for other in modules_of(node, trees)} - {name}
        for name, tree in trees.items()
    }
    while leaves := {name for name, others in imports.items() if not others}:
        imports = {name: others - leaves for name, others in imports.items() if name not in leaves}

    assert not imports, (
        "these modules import each other, or one that does: move what both need below them"
    )


def modules_of(node: ast.AST, modules: Collection[str]) -> list[str]:
    """The modules that a statement imports, the narrowest name of each."""
    match node:
        case ast.ImportFrom(module=str(module)):
            names = [f"{module}.{alias.name}" for alias in node.names]
            return [name if name in modules else module for name in names if module in modules]
        case ast.Import():
            return [alias.name for alias in node.names if alias.name in modules]
        case ast.Call(
            func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]
        ):
            return [name] if name in modules else []
    return []


def module_name(path: Path) -> str:
    return shown(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_names(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module)):
            return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return []


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs/decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")

    assert not [
        path.name for path in sorted(folder.glob("[0-9]*.md")) if f"({path.name})" not in index
    ]


CASE = re.compile(r"^\| ([MBIL]\d{1,2}|\d\d) \|.*\| (.+) \|$", re.MULTILINE)
NUMBER = re.compile(r"(?:^test_|_and_)(?:row_)?([mbil]?\d{1,2})(?=_)")


def test_the_cases_and_the_tests_name_each_other() -> None:
    cases = {
        number: set(re.findall(r"`(test_\w+)`", tests))
        for path in (ROOT / "docs/cases").glob("*.md")
        for number, tests in CASE.findall(path.read_text(encoding="utf-8"))
    }
    tests = {
        node.name
        for path in python_files("tests")
        for node in functions(path)
        if node.name.startswith("test_")
    }

    gone = {f"{case}: {name}" for case, names in cases.items() for name in names - tests}
    unlisted = {
        f"{number.upper()}: {name}"
        for name in tests
        for number in NUMBER.findall(name)
        if name not in cases.get(number.upper(), set())
    }

    mentioned = {
        number
        for path in python_files(*PACKAGES, "bench", "tests")
        for number in re.findall(r"\b[MB]\d\d\b", path.read_text("utf-8"))
    }

    assert not mentioned - cases.keys(), "docs/cases has no such number"
    assert not gone, "docs/cases names a test that does not exist"
    assert not unlisted, "add the test to its line in docs/cases, or name it by what it says"


def test_members_named_in_documents_exist() -> None:
    """`Scheduler.step` in a document is a method or an attribute of a class of ours."""
    members: dict[str, set[str]] = defaultdict(set)
    for path in python_files(*PACKAGES, "bench", "tests"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                members[node.name] |= set(re.findall(r"\w+", ast.unparse(node)))

    gone = [
        f"{shown(path)}:{number} {name}.{member}"
        for path in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *(ROOT / "docs").rglob("*.md")]
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for name, member in re.findall(r"`([A-Z][a-z]\w*)\.(\w+)", line)
        if member not in members[name]
    ]

    assert not gone, "name the class and the member that are there"


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    documents += [
        path for folder in (*PACKAGES, "deploy") for path in (ROOT / folder).rglob("*.md")
    ]
    broken = [
        f"{shown(document)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", document.read_text("utf-8"))
        if not (document.parent / target).exists()
    ]

    assert not broken


FILE = re.compile(r"(?<![\w.:<{*/-])(?:\.\./)*((?:[\w.-]+/)*[\w-]+\.(?:py|md|c|h|toml))(?![\w/*-])")
FOLDER = re.compile(r"(?<![\w.:<{$*/-])((?:[a-z_]+/)+)(?![\w<{.*])")
PLANNED = "deploy/README.md"  # it names what will come


def test_files_named_in_text_exist() -> None:
    """In documents, docstrings and comments. A bare file name may be in any folder."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (*PACKAGES, "bench", "tests", "docs", "deploy"):
        files += (
            path for path in (ROOT / folder).rglob("*.*") if path.parent.name != "__pycache__"
        )
    names = {f"/{shown(path)}" for path in files}
    names |= {f"/{parent}/" for path in files for parent in path.relative_to(ROOT).parents}

    gone = [
        f"{shown(path)}:{number} {name}"
        for path in files
        if path.suffix in (".py", ".md", ".c", ".h") and shown(path) != PLANNED
        for number, line in prose(path)
        for name in FILE.findall(line) + FOLDER.findall(line)
        if not any(each.endswith(f"/{name}") for each in names)
    ]

    assert not gone, "the text names a file or folder that is not there: name the one that is"


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The numbered lines of a document, or of a source file's docstrings and comments."""
    source = path.read_text("utf-8")
    lines = list(enumerate(source.splitlines(), 1))
    if path.suffix == ".md":
        yield from lines
        return
    for number, line in lines:
        if comment := re.search(r"(?:^|\s)(?:#|//) (.*)", line):
            yield number, comment[1]
    for node in ast.walk(ast.parse(source if path.suffix == ".py" else "")):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = getattr(node, "lineno", 1)
            docstring = ast.get_docstring(node, clean=False) or ""
            yield from ((first, line) for line in docstring.splitlines())


OURS = ("engine", "gateway", "billing", "bench")
# Named alike because they are alike; and files that are named after their command or resource.
NAMED_ALIKE = {"__init__.py", "__main__.py", "errors.py", "README.md"}
NAMED_AFTER_A_RESOURCE = ("gateway/commands/", "gateway/routes/")


def test_no_two_files_share_a_name() -> None:
    places = defaultdict(list)
    for folder in OURS:
        for path in sorted((ROOT / folder).rglob("*.*")):
            place = shown(path)
            if path.name in NAMED_ALIKE or place.startswith(NAMED_AFTER_A_RESOURCE):
                continue
            if path.parent.name != "__pycache__":
                places[path.name].append(place)
    twice = [", ".join(paths) for paths in places.values() if len(paths) > 1]

    assert not twice, listed("name each file by what it alone is", twice)


def test_no_two_public_classes_share_a_name() -> None:
    places = defaultdict(list)
    for path, node in classes(*OURS):
        if not node.name.startswith("_"):
            places[node.name].append(f"{shown(path)}:{node.lineno}")
    twice = [f"{name}: {', '.join(paths)}" for name, paths in places.items() if len(paths) > 1]

    assert not twice, listed("name each class by what it alone is", twice)


def listed(cure: str, places: list[str]) -> str:
    return "\n  ".join([cure, *places])


def classes(*folders: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in python_files(*folders):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield path, node


@pytest.mark.parametrize("package", OURS)
def test_exceptions_are_defined_in_errors_py(package: str) -> None:
    errors = {name for name, each in vars(builtins).items() if is_error(each)}
    known = {node.name: node for _, node in classes(*OURS)}
    # As many rounds as the deepest tree: an error is what derives from an error.
    for _ in range(5):
        errors |= {
            name
            for name, node in known.items()
            if any(base in errors or base.endswith(("Error", "Exception")) for base in bases(node))
        }

    astray = [
        f"{shown(path)}:{node.lineno} {node.name}"
        for path, node in classes(package)
        if node.name in errors and shown(path) != f"{package}/errors.py"
    ]

    assert not astray, listed(f"define it in {package}/errors.py, below its root error", astray)


def is_error(each: object) -> bool:
    return isinstance(each, type) and issubclass(each, BaseException)


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).rpartition(".")[2] for base in node.bases]


RIDDLES = re.compile(
    r"\b(whoever|whomever|nobody|somebody)\b"
    r"|\banswers (None|True|False|with|whether|what|how|if|that|at)\b|^(Answers|Says|Tells)\b",
    re.IGNORECASE,
)


def test_docstrings_are_plain() -> None:
    puzzling = [
        f"{shown(path)}:{getattr(node, 'lineno', 1)} {match[0]!r}"
        for path in python_files(*OURS)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for match in RIDDLES.finditer(ast.get_docstring(node) or "")
    ]

    cure = "name the party: a client, a request, the caller; say Return, not answers"
    assert not puzzling, listed(cure, puzzling)
