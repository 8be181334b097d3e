"""Evaluates a run: `python evaluate.py run=<run folder>`."""

from agent_tunix import signals

with signals.heeded_by(signals.leave):
    from agent_tunix.cli import evaluate

if __name__ == "__main__":
    evaluate()
