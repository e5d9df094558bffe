"""Makes a failing case short, and writes it as a test."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.chaos.case import Case, Operation, Settings

Fails = Callable[[Case], bool]

_TEST = '''"""A case that a run of chaos found (benchmarks/chaos.py), made short."""

from pathlib import Path

from tests.chaos.case import Case
from tests.chaos.models import Answers, Models
from tests.chaos.world import run
from tests.tiny_models import TinyModels

CASE = """
{case}
"""


def test_{name}(tiny_models: TinyModels, tmp_path: Path) -> None:
    """{error}"""
    models = Models(tmp_path, tiny_models)
    run(Case.from_json(CASE), models, Answers(models))
'''


def shrink(case: Case, fails: Fails, most_runs: int) -> Case:
    """The shortest case that was found to fail, with settings and operations as plain as they can
    be.

    Args:
        fails: whether a case fails.
        most_runs: how often that may be asked.
    """
    asked = 0

    def still(candidate: Case) -> bool:
        nonlocal asked
        asked += 1
        return asked <= most_runs and fails(candidate)

    before = None
    while case != before and asked < most_runs:
        before = case
        case = _fewer_operations(case, still)
        case = _plainer_settings(case, still)
        case = _plainer_operations(case, still)
    return case


def _fewer_operations(case: Case, fails: Fails) -> Case:
    """Delta debugging (Zeller and Hildebrandt 2002): leave out ever smaller pieces."""
    pieces = 2
    while len(case.operations) > 1:
        operations = case.operations
        size = -(-len(operations) // pieces)
        for start in range(0, len(operations), size):
            shorter = replace(case, operations=operations[:start] + operations[start + size :])
            if fails(shorter):
                case, pieces = shorter, max(2, pieces - 1)
                break
        else:
            if size == 1:
                return case
            pieces = min(len(operations), pieces * 2)
    return case


def _plainer_settings(case: Case, fails: Fails) -> Case:
    plain = Settings(target=case.settings.target, drafter=case.settings.drafter)
    for name in ("drafter", *vars(plain)):
        value = "none" if name == "drafter" else getattr(plain, name)
        change: dict[str, Any] = {name: value}
        tried = replace(case, settings=replace(case.settings, **change))
        if tried != case and fails(tried):
            case = tried
    return case


def _plainer_operations(case: Case, fails: Fails) -> Case:
    for index in range(len(case.operations)):
        for plainer in _plainer(case.operations[index]):
            operations = list(case.operations)
            operations[index] = plainer
            tried = replace(case, operations=tuple(operations))
            if fails(tried):
                case = tried
    return case


def _plainer(operation: Operation) -> Iterator[Operation]:
    plain = Operation(operation.do)
    for name, value in vars(plain).items():
        if getattr(operation, name) != value:
            yield replace(operation, **{name: value})


def write_test(case: Case, error: str, name: str, folder: Path) -> Path:
    """A file for pytest that runs the case; where it is.

    Args:
        error: what does not hold, in one line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"test_{name}.py"
    error = error.splitlines()[0].replace("\\", "/").replace('"', "'")[:80]
    path.write_text(_TEST.format(case=case.to_json(), name=name, error=error))
    return path


def alike(error: BaseException) -> Callable[[BaseException], bool]:
    """Whether another error is of this kind: the same class, the same text up to its numbers."""
    kind = _kind(error)
    return lambda other: _kind(other) == kind


def _kind(error: BaseException) -> Sequence[str]:
    text = "".join(" " if letter.isdigit() else letter for letter in str(error).splitlines()[0])
    return text.split()[:6]
