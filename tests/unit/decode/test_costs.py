"""The table of step costs: measuring, interpolation, following, storing."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.decode.costs import StepCosts, measure_costs
from dflash_trt.errors import ConfigError
from dflash_trt.runtime.session import SessionLimits, StepResult, StepRows

WIDTHS, SLOTS = (1, 2, 4, 16), (1, 4, 8)

seconds = st.floats(1e-5, 10.0)
tables = st.lists(
    st.lists(seconds, min_size=len(SLOTS), max_size=len(SLOTS)),
    min_size=len(WIDTHS),
    max_size=len(WIDTHS),
).map(lambda rows: StepCosts(WIDTHS, SLOTS, rows))


class Machine:
    """A session whose steps take what `cost` says, on a clock of its own."""

    def __init__(self, max_slots: int = 8, block: int = 16, scale: float = 1.0) -> None:
        self.limits = SessionLimits(block, 256, max_slots, 32, 100)
        self.now, self.scale = 0.0, scale
        self.shapes: list[tuple[int, int]] = []
        self.released: list[int] = []

    def cost(self, width: int, num_slots: int) -> float:
        drafter = 0.004 if width > 1 else 0.0
        return self.scale * (0.01 + drafter + 0.0005 * width * num_slots)

    def step(
        self, first_slot: int, rows: StepRows, num_drafts: int, *, want_logits: bool = False
    ) -> StepResult:
        num_slots, width = rows.tokens.shape
        assert first_slot == 0
        assert num_drafts == width - 1
        assert (rows.length + rows.count).max() <= self.limits.max_seq_len
        self.shapes.append((width, num_slots))
        self.now += self.cost(width, num_slots)
        row = np.zeros((num_slots, width), np.int32)
        return StepResult(np.ones(num_slots, np.int32), row)

    def release(self, slot: int) -> None:
        self.released.append(slot)

    def clock(self) -> float:
        return self.now


@given(tables)
def test_more_tokens_or_slots_never_cost_less(costs: StepCosts) -> None:
    grid = np.array([[costs.seconds(w, n) for n in range(1, 11)] for w in range(1, 18)])
    assert (np.diff(grid, axis=0) >= -1e-12).all()
    assert (np.diff(grid, axis=1) >= -1e-12).all()


def around(axis: tuple[int, ...], value: int) -> tuple[int, int]:
    """The nearest entries below and above, the last one beyond the end."""
    above = [at for at in axis if at >= value]
    return max(at for at in axis if at <= value), min(above, default=axis[-1])


@given(tables, st.integers(1, 20), st.integers(1, 12))
def test_what_lies_between_is_between(costs: StepCosts, width: int, num_slots: int) -> None:
    corners = [costs.seconds(w, n) for w in around(WIDTHS, width) for n in around(SLOTS, num_slots)]
    value = costs.seconds(width, num_slots)
    assert min(corners) <= value * (1 + 1e-9)
    assert value <= max(corners) * (1 + 1e-9)


def test_an_ascending_table_is_kept_as_it_is() -> None:
    rows = [[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [4.0, 4.5, 6.0], [9.0, 9.5, 10.0]]
    costs = StepCosts(WIDTHS, SLOTS, rows)
    assert [[costs.seconds(w, n) for n in SLOTS] for w in WIDTHS] == rows
    assert costs.seconds(3, 1) == 3.0
    assert costs.at_slots(4).tolist() == [2.0, 4.0, 4.5, 9.5]


@given(tables)
def test_a_table_is_stored_and_read_again(costs: StepCosts) -> None:
    again = StepCosts.from_json(json.loads(json.dumps(costs.to_json())))
    for width in WIDTHS:
        assert again.at_slots(3) == pytest.approx(costs.at_slots(3))
        assert again.seconds(width, 8) == pytest.approx(costs.seconds(width, 8))


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"widths": [1, 2], "slots": [1], "seconds": [[1.0]]},
        {"widths": [2, 1], "slots": [1], "seconds": [[1.0], [1.0]]},
        {"widths": [2, 4], "slots": [1], "seconds": [[1.0], [1.0]]},
        {"widths": [1, 2], "slots": [1], "seconds": [[1.0], [0.0]]},
        {"widths": [1, 2], "slots": [1], "seconds": [[1.0], [math.nan]]},
        {"widths": [1, 2], "slots": [1], "seconds": [["a"], [1.0]]},
        {"widths": [], "slots": [], "seconds": []},
    ],
)
def test_what_is_no_table_is_refused(data: object) -> None:
    with pytest.raises(ConfigError):
        StepCosts.from_json(data)


@given(tables, st.integers(1, 16), st.integers(1, 8), seconds)
def test_observing_moves_towards_what_was_seen(
    costs: StepCosts, width: int, num_slots: int, seen: float
) -> None:
    gap = abs(math.log(seen / costs.seconds(width, num_slots)))
    for _ in range(400):
        costs.observe(width, num_slots, seen)
    assert abs(math.log(seen / costs.seconds(width, num_slots))) <= max(0.8 * gap, 0.05)


def test_a_drift_of_the_machine_moves_all_widths_and_keeps_their_order() -> None:
    machine = Machine()
    costs = measure_costs(machine, clock=machine.clock)
    before = costs.at_slots(1)
    for _ in range(300):
        costs.observe(4, 1, 2 * machine.cost(4, 1))
    ratio = costs.at_slots(1) / before
    assert ratio[costs.widths.index(4)] == pytest.approx(2, rel=0.02)
    assert ratio.min() > 1.5


def test_one_step_that_was_interrupted_hardly_counts() -> None:
    costs = StepCosts((1, 2), (1,), [[0.01], [0.02]])
    costs.observe(2, 1, 5.0)
    costs.observe(2, 1, 0.0)
    assert costs.seconds(2, 1) < 0.021


def test_measuring_finds_the_costs_within_the_budget_and_leaves_the_slots() -> None:
    machine = Machine()
    costs = measure_costs(machine, clock=machine.clock)
    assert machine.now <= 2.0
    assert machine.released == list(range(8))
    assert costs.slots == (1, 4, 8)
    for width in costs.widths:
        for num_slots in costs.slots:
            wanted = machine.cost(width, num_slots)
            assert costs.seconds(width, num_slots) == pytest.approx(wanted, rel=0.3)
        assert costs.seconds(width, 1) == pytest.approx(machine.cost(width, 1), rel=1e-6)


def test_a_slow_model_is_measured_where_it_matters() -> None:
    machine = Machine(max_slots=64, scale=30.0)
    costs = measure_costs(machine, clock=machine.clock)
    assert {(1, 1), (4, 1), (16, 1)} == set(machine.shapes)
    assert costs.seconds(1, 1) == pytest.approx(machine.cost(1, 1))
    assert costs.seconds(16, 64) > costs.seconds(16, 1)


@pytest.mark.parametrize("block", [2, 3, 4, 10, 16, 64])
@pytest.mark.parametrize("num_slots", [1, 2, 4, 5, 64])
def test_every_block_and_number_of_slots_has_a_table(block: int, num_slots: int) -> None:
    machine = Machine(max_slots=num_slots, block=block)
    costs = measure_costs(machine, clock=machine.clock)
    assert costs.widths[0] == 1
    assert costs.widths[-1] == block
    assert costs.slots[-1] == num_slots


def test_only_the_slots_that_will_be_used_are_measured() -> None:
    machine = Machine()
    assert measure_costs(machine, 1, clock=machine.clock).slots == (1,)
    assert {num_slots for _, num_slots in machine.shapes} == {1}
