"""A taskset of verifiers with a tool: word problems whose numbers are too large for the model, and a calculator.

    cd examples
    python ../run_training.py data=verifiers data.task=pears model=gemma3_tiny_tool environment=verifiers \
        environment.tool_format=tags training.micro_batch_size=16 training.num_batches=40 grpo.num_generations=8 \
        grpo.beta=0.02 optimizer.learning_rate=1e-5

`vf-eval pears` plays the same against any endpoint.
"""

from __future__ import annotations

import re

import verifiers.v1 as vf

from agent_tunix.environments.arithmetic import generate
from agent_tunix.environments.calculator import calculated


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None  # the tool is called calculator, without the name of its server

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Adds, subtracts and multiplies whole numbers, as in 412+385."""
        return calculated(expression)


class PearsData(vf.TaskData):
    answer: str


class PearsTask(vf.Task[PearsData]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        found = re.search(r"<answer>(.*?)</answer>", trace.last_reply or "")
        return float(found is not None and found[1].strip() == self.data.answer)


class PearsConfig(vf.TasksetConfig):
    problems: int = 2000
    level: int = 1  # of numbers up to 499; 0: up to 49


class Pears(vf.Taskset[PearsTask, PearsConfig]):
    def load(self):
        for problem in generate(self.config.problems, 0, "train", self.config.level):
            yield PearsTask(PearsData(prompt=problem.question, answer=str(problem.answer)), self.config.task)


__all__ = ["Pears"]

if __name__ == "__main__":
    Calculator.run()
