"""A model that is measured by its endpoint has the numbers that `evaluate.py` gives it."""

from __future__ import annotations

import asyncio

import pytest

import agent_tunix
from agent_tunix.config.compose import compose_config
from agent_tunix.config.load import search_path, validate
from agent_tunix.config.schema import Config
from agent_tunix.training.data import load_examples
from agent_tunix.training.grading import grade

openai = pytest.importorskip("openai")


def test_an_endpoint_measures_what_evaluate_measures(address, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of = ["model=gemma3_tiny", "evaluation.num_examples=24", "evaluation.batch_size=24"]
    record = agent_tunix.evaluate(of, quiet=True)
    cfg = validate(compose_config("config", of, search_path([])), Config)
    examples = load_examples(cfg, "test", 24, tokenizer, print)

    async def answers() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            how = {"model": "package:tiny", "temperature": 0, "max_tokens": cfg.generation.max_generation_steps}
            asked = ([{"role": "user", "content": example.question}] for example in examples)
            found = await asyncio.gather(*(client.chat.completions.create(messages=one, **how) for one in asked))
            return [one.choices[0].message.content for one in found]

    assert not cfg.data.system_prompt, "else the server would have to know it"
    measured = grade(examples, [[text] for text in asyncio.run(answers())])
    assert measured["format_accuracy"] > 0
    assert measured == {name: record[name] for name in measured}
