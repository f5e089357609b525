"""The paper's experiments: one folder per experiment, with what the paper claims, how to run it and the results."""

from importlib.util import find_spec


def require_paper() -> None:
    """Raise if a package of the extra ``paper`` is not installed."""
    if missing := [name for name in ("scipy", "matplotlib", "jinja2") if find_spec(name) is None]:
        raise ValueError(f"the experiments and the report need {', '.join(missing)}: pip install 'deepsquare[paper]'")
