"""Section 3.2: ReLU-Square on spirals, Figures 3 to 6.

The paper claims that ReLU-Square fits smoother than ReLU and so has a lower test loss: in the regression of a
one-arm spiral, and in the classification of three arms. ``networks`` trains many networks in one batch, ``tuning``
runs the same hyperparameter search for every activation, ``measures`` has smoothness and cost, ``ablation`` looks
for the reasons, ``draw`` makes the figures, ``experiment`` runs all of this. ``regimes`` judges Figures 4 and 6 by
the length and the learning rate of training.
"""
