"""Tools to test one's own models with: exact laws, samples of them, and hypothesis tests."""

from .law import JointLaw, joint_law, judge_samples, sample_joint, uniforms
from .statistics import TestResult, chi_square, holm, kolmogorov_smirnov, smallest_total_variation

__all__ = [
    "JointLaw",
    "TestResult",
    "chi_square",
    "holm",
    "joint_law",
    "judge_samples",
    "kolmogorov_smirnov",
    "sample_joint",
    "smallest_total_variation",
    "uniforms",
]
