"""A reward function of your own: shorter reasoning is better.

cd examples
python ../run_training.py +experiment=quick_test +reward.functions.brevity=brevity_reward.brevity +reward.weights.brevity=0.1
"""

from __future__ import annotations


def brevity(prompt: str, completion: str, answer: str) -> float:
    """1 for an empty completion, falling to 0 at a hundred characters."""
    return max(0.0, 1.0 - len(completion) / 100)
