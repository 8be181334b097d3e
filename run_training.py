"""Trains a model: `python run_training.py +experiment=quick_test`."""

from agent_tunix import signals

with signals.heeded_by(signals.leave):
    from agent_tunix.cli import train

if __name__ == "__main__":
    train()
