"""The rules that keep the source readable and safe, checked on the syntax trees of every module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("kvcache", "model", "scheduler", "server")
"""From right to left: a package imports only packages that stand before it here."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_PYTHON_LINES = 13_500
MAX_KERNEL_LINES = 3_500
"""Lines of code in all: without blank lines, comments and docstrings."""

MODULES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
KERNELS = sorted(path for suffix in ("cpp", "h") for path in (ROOT / "model" / "kernels").glob(f"*.{suffix}"))
TORCH_FREE_EXCEPTIONS = {"kvcache/store.py", "scheduler/loading.py"}

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("torch", "save")}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=name_of(path))


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield node.module or ""


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def calls(tree: ast.Module) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)


@every_module
def test_imports_only_go_right(path: Path) -> None:
    own = LAYERS.index(name_of(path).split("/")[0])
    for module in imported_modules(tree_of(path)):
        if module.startswith("octavo."):
            assert LAYERS.index(module.split(".")[1]) <= own, f"{name_of(path)} imports {module}"


@every_module
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    for function in functions(tree_of(path)):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{function.name} has {lines} lines"
        arguments = function.args
        parameters = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
        assert parameters <= MAX_PARAMETERS + 1, f"{function.name} has {parameters} parameters, self included"


@every_module
def test_nothing_dangerous_or_hidden_is_used(path: Path) -> None:
    tree = tree_of(path)
    assert not set(imported_modules(tree)) & FORBIDDEN_MODULES
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), "module state is passed, not reached for"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), "a bare except hides faults"
    for call in calls(tree):
        target = call.func
        if isinstance(target, ast.Name):
            assert target.id not in FORBIDDEN_CALLS
            assert target.id != "print" or name_of(path) == "server/cli.py"
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            assert (target.value.id, target.attr) not in FORBIDDEN_ATTRIBUTES


@every_module
def test_pydantic_stays_in_the_server(path: Path) -> None:
    if not name_of(path).startswith("server/"):
        assert not any(module.split(".")[0] == "pydantic" for module in imported_modules(tree_of(path)))


@every_module
def test_modules_that_only_decide_import_no_torch(path: Path) -> None:
    name = name_of(path)
    if name.startswith(("kvcache/", "scheduler/", "server/")) and name not in TORCH_FREE_EXCEPTIONS:
        assert not any(module.split(".")[0] == "torch" for module in imported_modules(tree_of(path)))


@every_module
def test_public_names_are_documented(path: Path) -> None:
    tree = tree_of(path)
    assert ast.get_docstring(tree), "a module says what it owns"
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            nested = any(node in ast.walk(outer) and node is not outer for outer in functions(tree))
            assert nested or ast.get_docstring(node), f"{node.name} has no docstring"


def test_kernel_sources_are_short() -> None:
    for path in KERNELS:
        assert len(path.read_text().splitlines()) <= MAX_FILE_LINES, name_of(path)


def lines_of_code(path: Path) -> int:
    lines = path.read_text().splitlines()
    documentation: set[int] = set()
    if path.suffix == ".py":
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                documentation.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        1
        for number, line in enumerate(lines, 1)
        if line.strip() and number not in documentation and not line.strip().startswith(("#", "//"))
    )


def test_the_whole_source_stays_small() -> None:
    assert sum(map(lines_of_code, MODULES)) <= MAX_PYTHON_LINES
    assert sum(map(lines_of_code, KERNELS)) <= MAX_KERNEL_LINES


def test_comments_and_docstrings_are_no_code() -> None:
    path = ROOT / "kvcache" / "layout.py"
    assert 10 < lines_of_code(path) < len(path.read_text().splitlines())


def test_the_import_rule_notices_a_violation() -> None:
    tree = ast.parse("from octavo.server import app\nimport octavo.kvcache.pool")
    layers = [LAYERS.index(module.split(".")[1]) for module in imported_modules(tree)]
    assert layers == [3, 0]
    assert max(layers) > LAYERS.index("model")
