"""What the rooms promise and import-linter cannot see."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest

import slipstream
from slipstream.speculative.catalogue import METHODS

ROOT = Path(slipstream.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
# Rooms that may name drafting methods: train for its recipes.
METHOD_ROOMS = {"speculative", "train"}
# Methods whose names are words: other names may begin with them.
WORDS = {"suffix", "custom", "combination"}
# Rooms in which these words have other meanings: a custom data set, the suffix of a file.
WORD_ROOMS = {"bench", "cli"}
DEVICE_ROOMS = {"kernels", "runner"}


def room(file: Path) -> str:
    return file.relative_to(ROOT).parts[0]


@cache
def nodes(file: Path) -> list[Any]:
    """The nodes of a file's syntax tree, the module first."""
    return [*ast.walk(ast.parse(file.read_text()))]


@pytest.fixture(scope="module", autouse=True)
def _trees_are_dropped() -> Iterator[None]:
    yield
    nodes.cache_clear()


def named(files: list[Path]) -> list[str]:
    return [str(file.relative_to(ROOT)) for file in files]


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(file):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def docstrings(file: Path) -> Iterator[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in nodes(file):
        if isinstance(node, kinds):
            yield ast.get_docstring(node) or ""


def code_strings(file: Path) -> Iterator[str]:
    """The strings of a file's code, without WORDS where these have other meanings."""
    other = WORDS if room(file) in WORD_ROOMS else set()
    return (text for text in _strings(file) if text.lower() not in other)


def _strings(file: Path) -> Iterator[str]:
    """Identifiers and string constants that are not docstrings."""
    documents = {
        id(node.body[0].value)
        for node in nodes(file)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes(file):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and id(node) not in documents:
            yield str(node.value)


def test_method_names_stay_in_their_rooms() -> None:
    prefixes = [*(METHODS.keys() - WORDS), "eagle", "medusa", "pard"]
    names = re.compile(
        rf"^({'|'.join(prefixes)}|({'|'.join(WORDS)})$)|\b({'|'.join(prefixes)})\b", re.IGNORECASE
    )
    leaking = [
        file
        for file in SOURCES
        if room(file) not in METHOD_ROOMS
        and file.name != "own_drafter.py"  # tensors that loading leaves to their drafter
        # OpenAI has a field of the name of a method.
        and not {"protocol", "completions.py", "fill_in.py"} & {*file.parts}
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


def test_methods_are_known_without_torch() -> None:
    """The command line needs the methods before it is known whether a model is loaded."""
    code = (
        "import sys; from slipstream.speculative.catalogue import METHODS; "
        "assert METHODS and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT.parent)


def test_no_file_is_called_utils() -> None:
    assert [file for file in SOURCES if "util" in file.stem or "helper" in file.stem] == []


def test_the_draft_policy_is_read_in_one_sitting() -> None:
    policy = ROOT / "engine" / "drafting" / "policy.py"
    assert len(policy.read_text().splitlines()) < 300


@pytest.mark.parametrize("file", SOURCES, ids=named(SOURCES))
def test_files_and_functions_stay_readable(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 400
    # A kernel's arguments alone take ten lines, and it cannot return early from a part of itself.
    most = 80 if "triton" in file.parts else 60
    long = [f.name for f in functions(file) if (f.end_lineno or 0) - f.lineno >= most]
    assert long == []


def test_no_two_classes_have_one_name() -> None:
    """Except bodies of requests, whose names are those of their protocols."""
    homes: dict[str, list[Path]] = {}
    for file in SOURCES:
        for node in nodes(file):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(file)
    shared = {name: named(files) for name, files in homes.items() if len(files) > 1}
    assert {
        name: files for name, files in shared.items() if not all("protocol" in it for it in files)
    } == {}


def test_every_module_says_what_it_is_for() -> None:
    assert [file for file in SOURCES if not ast.get_docstring(nodes(file)[0])] == []


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    found = [
        f"{file.relative_to(ROOT.parent)}: {text.splitlines()[0]}"
        for file in [*SOURCES, *(ROOT.parent / "tests").rglob("*.py")]
        for text in docstrings(file)
        if text.startswith(("The same", "Of ", "By "))
    ]
    assert found == []


def test_imports_have_no_circles() -> None:
    graph = grimp.build_graph("slipstream", cache_dir=None)
    circular = [
        module
        for module in sorted(graph.modules)
        if graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
    ]
    assert circular == []


# Files that ask for the class of a weight, although they are no format: the C++ column does so for
# the class that it packs weights into. Only less.
ASKING_LEFT = {"kernels/cpu/matmul.py"}


def test_nobody_asks_for_the_class_of_a_weight() -> None:
    """A format's class answers for it, so that a new format changes no other file."""
    bases = {
        node.name: {name.id for name in node.bases if isinstance(name, ast.Name)}
        for file in SOURCES
        for node in nodes(file)
        if isinstance(node, ast.ClassDef)
    }
    weights = {"Weight"}
    while more := {name for name in bases.keys() - weights if bases[name] & weights}:
        weights |= more
    assert len(weights) > 4
    asking = [
        file
        for file in SOURCES
        if "formats" not in file.parts and any(names & weights for names in asked_for(file))
    ]
    assert set(named(asking)) <= ASKING_LEFT


def asked_for(file: Path) -> Iterator[set[str]]:
    """The names in the second argument of each `isinstance`, and those of class patterns."""
    for node in nodes(file):
        if isinstance(node, ast.MatchClass):
            yield {name.id for name in ast.walk(node.cls) if isinstance(name, ast.Name)}
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            yield {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}


def test_the_public_names_are_the_documented_ones() -> None:
    assert set(slipstream.__all__) == {*slipstream._HOMES, "__version__"}
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None


def test_asserts_of_the_cpp_column_only_narrow_types() -> None:
    """`python -O` leaves them out: what C++ must not be given is refused by errors."""
    for file in (ROOT / "kernels" / "cpu").glob("*.py"):
        for node in nodes(file):
            if isinstance(node, ast.Assert):
                # `x is None or ...` would be a condition on what a caller gives.
                narrows = r"isinstance\([\w.]+, [\w.| ]+\)|[\w.]+ is not None"
                assert re.fullmatch(narrows, ast.unparse(node.test)), f"{file}:{node.lineno}"
