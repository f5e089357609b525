"""The plan of the study: it is read strictly, and its runs are in order."""

from pathlib import Path

import pytest
from helpers.study_plans import CIFAR, TINY, write

from deepsquare.paper.study.experiment import study_status
from deepsquare.paper.study.plan import PLAN, read_plan


def test_the_committed_plan_is_valid_and_asks_the_abstract_s_question_first() -> None:
    plan = read_plan(PLAN)
    names = [family.name for family in plan.family if not family.name.startswith("learning rate")]
    assert names[:2] == ["ShuffleNetV2-0.5×", "vanilla CNN, 200 classes"]
    runs = [run for _, planned, fits in plan.fitting() if fits for run in planned]
    assert len({run.key for run in runs}) == len(runs)
    for family in plan.family:
        dropouts = {getattr(run.recipe, "dropout", None) for run in family.runs()}
        assert len(dropouts) == 1, "all rows of a comparison have the same dropout"


def test_runs_are_ordered_by_family_then_seed_and_no_run_is_in_two(tmp_path: Path) -> None:
    more = CIFAR.replace('"cifar"', '"more"').replace("seeds = 2", "seeds = 3").replace("[2]", "[3]")
    plan = read_plan(write(tmp_path / "plan.toml", TINY, CIFAR, more))
    first, second, third = plan.fitting()
    assert [(run.row, run.seed) for run in first[1][:3]] == [("plain", 0), ("SP", 0), ("plain", 1)]
    assert len(second[1]) == 4
    assert [(run.row, run.seed) for run in third[1]] == [("Original", 2), ("DeepSquare3", 2)]
    ((_, alone, _),) = plan.fitting(["more"])  # selected alone, it has all its runs
    assert len(alone) == 6


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seeds = 5", "seeds = ", r"plan.toml: not valid TOML: .*at line 9"),
        (
            "seeds = 5",
            'seeds = "five"',
            r"plan.toml, line 3: family 'tiny': seeds is 'five': Expected `int`, got `str`",
        ),
        ("seeds = 5", "seed = 5", r"plan.toml, line 3: .*unknown field `seed`"),
        ('"pooling"', '"poolin"', r"plan.toml, line 3: family 'tiny': .*poolin"),
        ("[3, 5]", "[3, 4]", r"line 3: family 'tiny': looks is \[3, 4\]; expected .* end with 5 seeds"),
        ("[0.01, 0.04]", "[0.05, 0.04]", r"line 3: family 'tiny': alpha is \[0.05, 0.04\]; expected .* 0.05 in all"),
        ("hours = 1.0", "hours = 0.0", "line 3: family 'tiny': hours is 0.0; expected .* more than 0"),
        ("seeds = 5", "seeds = 0", "line 3: family 'tiny': seeds is 0; expected at least 1"),
        ("seeds = 5", "seeds = 1000000", "line 3: family 'tiny': seeds is 1000000; .* at most 1000"),
        ("[0.01, 0.04]", "[nan, 0.04]", r"line 3: family 'tiny': alpha is \[nan, 0.04\]"),
        ('"64 px"', '""', "line 3: family 'tiny': a name is empty"),
        ("hours = 1.0", "hours = 1.0\nrecipe = { pad = 64 }", "line 3: family 'tiny': pad is 64; expected less than"),
        ("hours = 1.0", "hours = 1.0\nrecipe = { batch_size = 100001 }", "batch_size is 100001; expected at most the"),
        ("hours = 1.0", "hours = 1.0\nkwargs = { a = 1979-05-27 }", "line 3: family 'tiny': .*date is not JSON"),
        ('{ "plain" = "", "SP" = "pooling" }', "{}", "line 3: family 'tiny': rows is empty"),
        (
            '"tiny_imagenet"',
            '"mnist"',
            r"'tiny': experiment is 'mnist': .*\(cifar10, cifar10_ablation or tiny_imagenet\)",
        ),
        ("[[family]]", "[family]", r"plan.toml: family: Expected `array`, got `object`; write \[\[family\]\]"),
        ("hours = 1.0\n", "", "line 3: family 'tiny': Object missing required field `hours`"),
        ("hours = 1.0", "hours = 1.0\nrecipe = { size = 48 }", "line 3: family 'tiny': size is 48; expected 32 or 64"),
        (
            "hours = 1.0",
            "hours = 1.0\nrecipe = { sise = 64 }",
            "line 3: family 'tiny': a recipe has no field sise; its fields are batch_size, ",
        ),
        ("hours = 1.0", 'hours = 1.0\nrecipe = { lr = "x" }', "line 3: family 'tiny': lr is 'x'; expected float"),
        ('rows = { "plain" = "", "SP" = "pooling" }', 'rows = ["SP"]', "rows is a list; expected labels with"),
    ],
)
def test_a_plan_with_an_error_is_refused_with_file_and_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TINY
    path = write(tmp_path / "plan.toml", TINY.replace(old, new))
    with pytest.raises(ValueError, match=message):
        read_plan(path)


def test_more_errors_in_plans(tmp_path: Path) -> None:
    path = write(tmp_path / "plan.toml", CIFAR.replace("DeepSquare3", "DeepSquare33"))
    with pytest.raises(ValueError, match="line 3: family 'cifar': no row is called DeepSquare33"):
        read_plan(path)
    with pytest.raises(ValueError, match="line 3: family 'cifar': schedule is 'forever'; expected one of quick, "):
        read_plan(write(path, CIFAR.replace('"long"', '"forever"')))
    for more in ("recipe = { lr = 0.1 }", 'model = "resnet18"', "kwargs = { width = 2 }"):
        with pytest.raises(ValueError, match="line 3: family 'cifar': it has a recipe, kwargs or a model; on CIFAR-10"):
            read_plan(write(path, f"{CIFAR}{more}\n"))
    with pytest.raises(ValueError, match="line 3: family 'cifar': rows has specs; on CIFAR-10 expected a list"):
        read_plan(write(path, CIFAR.replace('["Original", "DeepSquare3"]', '{ "Original" = "" }')))
    with pytest.raises(ValueError, match=r"line 13: family 'cifar': another family has this name"):
        read_plan(write(path, CIFAR, CIFAR))
    (tmp_path / "bytes.toml").write_bytes(b"\x9b\xff")
    with pytest.raises(ValueError, match=r"bytes.toml is no text .*; expected a plan as TOML"):
        read_plan(tmp_path / "bytes.toml")
    with pytest.raises(FileNotFoundError, match=r"the plan .*other.toml does not exist; expected a TOML file"):
        read_plan(tmp_path / "other.toml")
    with pytest.raises(FileNotFoundError, match=r"the plan .* is a folder; expected a TOML file"):
        read_plan(tmp_path)
    for budget in ("nan", "0.0", "-1.0", "inf"):
        path.write_text(f"budget = {budget}\n{CIFAR}")
        with pytest.raises(ValueError, match=f"plan.toml: budget is {budget} for 1 families; expected more than 0"):
            read_plan(path)
    path.write_text("budget = 1.0\nfamily = []\n")
    with pytest.raises(ValueError, match=r"budget is 1.0 for 0 families; expected more than 0 of both"):
        read_plan(path)
    path.write_text(f"budget = 1.0\nx = {'[' * 2000}{']' * 2000}\n")
    with pytest.raises(ValueError, match=r"plan.toml: not valid TOML: .*recursion"):
        read_plan(path)
    other = TINY.replace('"tiny"', '"other"') + "recipe = { epochs = 2 }\n"
    with pytest.raises(
        ValueError, match="line 14: family 'other': an earlier family has plain, 64 px, seed 0 too, but ep"
    ):
        read_plan(write(path, TINY, other))
    path.write_bytes(b"\xef\xbb\xbf" + write(path, CIFAR).read_bytes())  # with a byte order mark
    assert read_plan(path).family[0].name == "cifar"
    with pytest.raises(ValueError, match=r"has no family nothing; its families are 'cifar'"):
        study_status(write(path, CIFAR), tmp_path, ["nothing"])
