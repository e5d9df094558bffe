"""What the rooms promise and import-linter cannot see."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream
from slipstream.speculative.catalogue import METHODS

ROOT = Path(slipstream.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
# Where the names of drafting methods may stand, besides the command line's help.
METHOD_ROOMS = {"speculative", "cli", "train"}
# Methods whose names are words: other names may begin with them.
WORDS = {"suffix", "custom", "combination"}
# Where these words mean other things: a custom data set, the suffix of a file.
WORD_ROOMS = {"bench"}
DEVICE_ROOMS = {"kernels", "runner"}


def room(file: Path) -> str:
    return file.relative_to(ROOT).parts[0]


def named(files: list[Path]) -> list[str]:
    return [str(file.relative_to(ROOT)) for file in files]


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_strings(file: Path) -> Iterator[str]:
    """Where the words of WORDS mean other things, they are left out."""
    other = WORDS if room(file) in WORD_ROOMS else set()
    return (text for text in _strings(file) if text.lower() not in other)


def _strings(file: Path) -> Iterator[str]:
    """Identifiers and string constants that are not docstrings."""
    tree = ast.parse(file.read_text())
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and id(node) not in documents:
            yield str(node.value)


def test_method_names_stay_in_their_rooms() -> None:
    prefixes = [*(METHODS.keys() - WORDS), "eagle", "medusa", "pard"]
    names = re.compile(rf"^({'|'.join(prefixes)}|({'|'.join(WORDS)})$)", re.IGNORECASE)
    leaking = [
        file
        for file in SOURCES
        if room(file) not in METHOD_ROOMS
        and file.name != "modules_beside.py"  # tensors that loading leaves to their drafter
        and "protocol" not in file.parts  # OpenAI has a field of the name of a method
        and any(names.search(text) for text in code_strings(file))
    ]
    assert named(leaking) == []


def test_device_kinds_are_asked_for_in_kernels_and_runner_only() -> None:
    asking = [
        file
        for file in SOURCES
        if room(file) not in DEVICE_ROOMS
        and re.search(r"\bdevice(\.type)?\s*[!=]=", file.read_text())
    ]
    assert named(asking) == []


def test_no_file_is_called_utils() -> None:
    assert [file for file in SOURCES if "util" in file.stem or "helper" in file.stem] == []


@pytest.mark.parametrize("file", SOURCES, ids=named(SOURCES))
def test_files_and_functions_stay_readable(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 400
    # A kernel's arguments alone take ten lines, and it cannot return early from a part of itself.
    most = 80 if "triton" in file.parts else 60
    long = [f.name for f in functions(file) if (f.end_lineno or 0) - f.lineno >= most]
    assert long == []


@pytest.mark.parametrize("file", SOURCES, ids=named(SOURCES))
def test_public_functions_and_classes_are_documented_where_contracts_live(file: Path) -> None:
    """Modules always; public classes always."""
    tree = ast.parse(file.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    bare = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert bare == []


def test_the_public_names_are_the_documented_ones() -> None:
    assert set(slipstream.__all__) == {*slipstream._HOMES, "__version__"}
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
