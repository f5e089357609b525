"""Section 3.1: the exact count of connected components, and the run that draws Figure 2."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepsquare.paper.fig2 import experiment as fig2
from deepsquare.paper.fig2.regions import (
    Activation,
    Network,
    boundary,
    components,
    on_grid,
    window_components,
)
from deepsquare.results import Store

IDENTITY = ((1, 0), (0, 1))
ACTIVATIONS: tuple[Activation, Activation] = ("square", "relu")


def network(
    a: float,
    c: float,
    d: float,
    first: tuple[tuple[float, float], tuple[float, float]] = IDENTITY,
    bias: tuple[float, float] = (0, 0),
) -> Network:
    """A network whose decision function is D = a·σ(h₁) + c·σ(h₂) + d."""
    return Network.from_weights(first, bias, ((a + 5, 5), (c - 2, -2)), (d + 1, 1))


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        ((1, -1, 1), (1, 2)),  # hyperbola
        ((1, -1, -1), (2, 1)),  # hyperbola, the other pair of branches
        ((1, -1, 0), (2, 2)),  # two crossing lines: without (18) both regions are double cones
        ((1, 1, -1), (1, 1)),  # ellipse
        ((1, 1, 1), (1, 0)),  # no boundary
        ((1, 1, 0), (1, 0)),  # a point: the plane without it is connected
        ((-1, -2, 0), (0, 1)),
        ((1, 0, -1), (2, 1)),  # two parallel lines: (17) is not needed for two pieces
        ((1, 0, 0), (2, 0)),  # a double line, which belongs to neither region
        ((0, -3, 1), (1, 2)),
        ((0, 0, 1), (1, 0)),
        ((0, 0, -1), (0, 1)),
        ((0, 0, 0), (0, 0)),  # D = 0 everywhere
    ],
)
def test_square_full_rank(decision: tuple[int, int, int], expected: tuple[int, int]) -> None:
    assert components(network(*decision), "square") == expected
    assert components(network(*decision, first=((2, 1), (-1, 3)), bias=(0.1, -7)), "square") == expected


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        ((1, -1, 1), (1, 1)),
        ((1, 1, -1), (1, 1)),  # an L, whose arms meet through a quadrant
        ((-1, -1, 1), (1, 1)),
        ((1, -1, 0), (1, 1)),
        ((1, 1, 0), (1, 0)),  # D = 0 on a whole quadrant
        ((1, 1, 1), (1, 0)),
        ((1, 0, -1), (1, 1)),
        ((0, -1, 0), (0, 1)),
        ((0, 0, 1), (1, 0)),
        ((0, 0, 0), (0, 0)),
    ],
)
def test_relu_full_rank(decision: tuple[int, int, int], expected: tuple[int, int]) -> None:
    assert components(network(*decision), "relu") == expected


@pytest.mark.parametrize(
    ("activation", "decision", "second_row", "bias", "expected"),
    [
        ("relu", (1, 1, -1), -1, (0, 0), (2, 1)),  # |t| − 1: ReLU, two pieces
        ("relu", (1, 1, 0), -1, (0, 0), (2, 0)),  # |t|
        ("relu", (1, 1, 1), -1, (0, 0), (1, 0)),
        ("relu", (1, 1, 0), -1, (-1, -1), (2, 0)),  # D = 0 on an interval
        ("relu", (1, 1, -3), -1, (1, 1), (2, 1)),  # both units on between the cuts
        ("relu", (2, -3, -1), 1, (0, -2), (1, 2)),  # −1, then up, then down again
        ("relu", (1, -1, 0), 1, (0, 0), (0, 0)),  # the units cancel
        ("relu", (1, 1, -1), 0, (0, 2), (1, 0)),  # the second unit is the constant 2
        ("square", (1, 1, -1), -1, (0, 0), (2, 1)),  # 2t² − 1
        ("square", (1, 1, 0), -1, (0, 0), (2, 0)),  # 2t²: a double root
        ("square", (1, -1, 1), 1, (0, 0), (1, 0)),  # constant 1, though (17) and (18) hold
        ("square", (1, -1, 1), 1, (0, 1), (1, 1)),  # t² − (t + 1)² + 1 = −2t
        ("square", (1, -1, 1), 2, (0, 0), (1, 2)),  # 1 − 3t²
        ("square", (-1, 2, 1), 1, (0, 0), (1, 0)),  # t² + 1: no root
    ],
)
def test_rank_one(
    activation: Activation,
    decision: tuple[int, int, int],
    second_row: int,
    bias: tuple[int, int],
    expected: tuple[int, int],
) -> None:
    for first in (
        ((1, 0), (second_row, 0)),
        ((0, 1), (0, second_row)),
        ((1, -2), (second_row, -2 * second_row)),
    ):
        net = network(*decision, first=first, bias=bias)
        assert net.rank == 1
        assert components(net, activation) == expected


@pytest.mark.parametrize(("bias", "expected"), [((2, 0), (1, 0)), ((1, 0), (0, 0)), ((0, 0), (0, 1))])
def test_rank_zero_is_constant(bias: tuple[int, int], expected: tuple[int, int]) -> None:
    for activation in ACTIVATIONS:
        net = network(1, 1, -1, first=((0, 0), (0, 0)), bias=bias)
        assert net.rank == 0
        assert components(net, activation) == expected


def test_no_tolerance() -> None:
    """One unit in the last place of one bias is the difference between crossing lines and a hyperbola."""
    weights = (((0.1, 0.7), (0.3, -0.2)), (0.1, 0.2), ((1.0, 0.0), (0.0, 1.0)))
    assert components(Network.from_weights(*weights, (0.1, 0.1)), "square") == (2, 2)
    assert components(Network.from_weights(*weights, (0.1, np.nextafter(0.1, 1))), "square") == (2, 1)
    assert Network.from_weights(((0.1, 0.3), (0.3, 0.9)), *weights[1:], (0.1, 0.2)).rank == 2  # 0.1 is not 1/10


def _grid_agrees(net: Network, activation: Activation, reach: float) -> bool:
    return window_components(net, activation, (-reach, reach, -reach, reach), 801) == components(net, activation)


def test_agrees_with_flood_fill_in_a_large_window() -> None:
    """Random networks whose vertices all lie well inside the window, so that the grid is right."""
    rng = np.random.default_rng(0)
    checked = 0
    while checked < 150:
        angle, (a, c), d = rng.uniform(0, 2 * np.pi), rng.uniform(0.5, 2, 2), rng.uniform(0.5, 2)
        a, c, d = (value * rng.choice((-1, 1)) for value in (a, c, d))
        turn = ((np.cos(angle), np.sin(angle)), (-np.sin(angle), np.cos(angle)))
        net = network(a, c, d, first=turn, bias=tuple(rng.uniform(-1, 1, 2)))
        for activation in ACTIVATIONS:
            assert _grid_agrees(net, activation, 20), (net, activation)
            checked += 1


@pytest.mark.parametrize("decision", [(1, 1, -1), (1, 1, -3), (-1, -2, 1), (1, 2, 1)])
@pytest.mark.parametrize("bias", [(0.3, 0.4), (-1.3, -0.8), (2.1, -1.0)])
def test_agrees_with_flood_fill_at_rank_one(decision: tuple[int, int, int], bias: tuple[float, float]) -> None:
    net = network(*decision, first=((1, 0.5), (-1, -0.5)), bias=bias)
    for activation in ACTIVATIONS:
        assert _grid_agrees(net, activation, 20)


def test_a_window_gives_a_wrong_count() -> None:
    """The network of the third panel: connected round a tip that the window leaves out."""
    panel = fig2.PANELS[2]
    assert panel.window is not None
    assert components(panel.network, "relu") == (1, 1)
    assert window_components(panel.network, "relu", panel.window) == (1, 2)
    assert window_components(panel.network, "relu", fig2.VIEW) == (1, 1)
    # And the other way round: a window too small for the second branch of the hyperbola.
    assert window_components(fig2.HYPERBOLA, "square", (0, 3, -1, 1)) == (1, 1)
    assert components(fig2.HYPERBOLA, "square") == (1, 2)


numbers = st.integers(-3, 3) | st.floats(-4, 4)
pairs = st.tuples(numbers, numbers)
matrices = st.tuples(pairs, pairs)
networks = st.builds(Network.from_weights, matrices, pairs, matrices, pairs)
activations = st.sampled_from(ACTIVATIONS)


@given(networks, activations)
def test_swapping_hidden_units_changes_nothing(net: Network, activation: Activation) -> None:
    swapped = Network(net.first[::-1], net.first_bias[::-1], net.second[::-1], net.second_bias)
    assert components(swapped, activation) == components(net, activation)


@given(networks, activations)
def test_swapping_classes_swaps_the_counts(net: Network, activation: Activation) -> None:
    second = (net.second[0][::-1], net.second[1][::-1])
    swapped = Network(net.first, net.first_bias, second, net.second_bias[::-1])
    assert components(swapped, activation) == components(net, activation)[::-1]


@given(networks, activations, st.tuples(*[st.integers(-5, 5)] * 6))
def test_affine_change_of_the_input(net: Network, activation: Activation, change: tuple[int, ...]) -> None:
    m11, m12, m21, m22, m1, m2 = change
    assume(m11 * m22 != m12 * m21)
    first = [(p * m11 + q * m21, p * m12 + q * m22) for p, q in net.first]
    bias = [p * m1 + q * m2 + k for (p, q), k in zip(net.first, net.first_bias, strict=True)]
    changed = Network.from_weights(first, bias, net.second, net.second_bias)
    assert components(changed, activation) == components(net, activation)


@given(networks, activations, st.fractions(min_value=Fraction(1, 50), max_value=50))
def test_positive_rescaling(net: Network, activation: Activation, scale: Fraction) -> None:
    second = [[scale * w for w in row] for row in net.second]
    scaled = Network.from_weights(net.first, net.first_bias, second, [scale * b for b in net.second_bias])
    assert components(scaled, activation) == components(net, activation)


@settings(max_examples=500)
@given(networks)
def test_the_claims_of_section_3_1(net: Network) -> None:
    a, c, d = net.decision
    assume(net.rank == 2)
    assert max(components(net, "relu")) <= 1
    if a * c < 0 and d != 0:
        assert sorted(components(net, "square")) == [1, 2]
        assert components(net, "square")[0 if d > 0 else 1] == 1  # the region of the origin is the whole one


@given(networks, activations)
def test_at_most_two_components(net: Network, activation: Activation) -> None:
    assert max(components(net, activation)) <= 2


@pytest.mark.parametrize("panel", fig2.PANELS, ids=lambda panel: panel.title)
def test_boundary_lies_where_the_outputs_tie(panel: fig2.Panel) -> None:
    a, c, d = (float(value) for value in panel.network.decision)
    first, bias = (np.array(part, dtype=float) for part in (panel.network.first, panel.network.first_bias))
    for curve in boundary(panel.network, panel.activation):
        h = first @ curve[:, ~np.isnan(curve[0])] + bias[:, None]
        s = h**2 if panel.activation == "square" else np.maximum(h, 0)
        np.testing.assert_allclose(a * s[0] + c * s[1] + d, 0, atol=1e-9 * (1 + np.abs(s).max(initial=0)))


def test_on_grid_is_the_sign_of_equation_16() -> None:
    above = on_grid(fig2.HYPERBOLA, "square", (-3, 3, -2, 2), 61)
    x2, x1 = np.meshgrid(np.linspace(-2, 2, 61), np.linspace(-3, 3, 61), indexing="ij")
    clear = np.abs(x2**2 - x1**2 + 1) > 1e-9
    np.testing.assert_array_equal(above[clear], (x2**2 - x1**2 + 1 > 0)[clear])


def test_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summaries = fig2.run(tmp_path / "figures", tmp_path / "rows", seed=3, networks=150)
    figure, store = tmp_path / "figures" / "fig2.png", Store(tmp_path / "rows" / "fig2.jsonl")
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size < 150_000
    rows = store.rows()
    assert len(rows) == len({row.row for row in rows}) == len(fig2.CASES) * len(fig2.DISTRIBUTIONS)
    assert {(row.experiment, row.seed, row.recipe["drawn"]) for row in rows} == {("fig2", 3, 150)}
    assert all(row.versions and row.hardware and row.date for row in rows)
    assert all(row.metrics["networks"] == sum(row.metrics["components"].values()) for row in rows)
    assert fig2.summarize(rows) == summaries
    assert [summary.holds for summary in summaries] == [True, True, None, None, None, None]
    assert any(max(pair) > 1 for pair in summaries[-1].counts)  # ReLU of rank 1
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["fig2.jsonl", "fig2.png"]
    assert "holds" in capsys.readouterr().out

    assert fig2.run(tmp_path / "again", tmp_path / "again", seed=3, networks=150) == summaries
    assert (tmp_path / "again" / "fig2.png").read_bytes() == figure.read_bytes()


def test_a_claim_that_does_not_hold() -> None:
    relu = fig2.CASES[1]
    assert fig2.CaseSummary(relu, 9, Counter({(1, 1): 8})).holds is True
    assert fig2.CaseSummary(relu, 9, Counter({(1, 1): 8, (1, 2): 1})).holds is False
    assert fig2.CaseSummary(relu, 9, Counter()).holds is None


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="networks is 0"):
        fig2.run(tmp_path, tmp_path, networks=0)
    with pytest.raises(OSError, match="cannot write into"):
        fig2.run(tmp_path / "file", tmp_path)
    with pytest.raises(ValueError, match="expected two finite numbers"):
        network(float("nan"), 0, 0)
    with pytest.raises(ValueError, match="expected two finite numbers"):
        Network.from_weights(IDENTITY, (1, 2, 3), IDENTITY, (0, 0))
    with pytest.raises(ValueError, match="expected 'square' or 'relu'"):
        components(network(1, 1, 1), "tanh")  # type: ignore[arg-type]
