"""The instruction sets that the kernel tests run on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
from paged_steps import INSTRUCTION_SETS, kernels, settings_restored


@pytest.fixture(params=["torch", *INSTRUCTION_SETS])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The torch reference, or the C++ kernels with one instruction set, which is selected."""
    with settings_restored():
        if request.param != "torch":
            kernels.set_isa(request.param)
        yield request.param


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The selected instruction set of the C++ kernels."""
    with settings_restored():
        kernels.set_isa(request.param)
        yield request.param


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run all cases of a test on the best instruction set, and each case on one of the others in turn.

    A test with fewer cases than other instruction sets runs all of them on each.
    """
    others = INSTRUCTION_SETS[1:]
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        chosen = next(
            (value for value in parameters(item).values() if isinstance(value, str) and value in others), None
        )
        if chosen is not None:
            cases[item.nodeid.partition("[")[0], chosen].append(item)
    dropped = {
        item
        for (_, chosen), of_test in cases.items()
        for index, item in enumerate(of_test)
        if len(of_test) >= len(others) and index % len(others) != others.index(chosen)
    }
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=list(dropped))


def parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
