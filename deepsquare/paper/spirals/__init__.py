"""Section 3.2: ReLU-Square on spirals, Figures 3 to 6.

The paper claims that ReLU-Square fits smoother than ReLU and so has a lower test loss: in the regression of a
one-arm spiral, and in the classification of three arms. ``networks`` trains many networks at once, ``tuning``
gives every activation the same search for a setting, ``measures`` counts smoothness and cost, ``ablation``
explains, ``draw`` draws, ``experiment`` is the run.
"""

from deepsquare.paper.spirals.experiment import SpiralsResult, run

__all__ = ["SpiralsResult", "run"]
