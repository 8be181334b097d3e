"""Episodes of several turns: what is attended to, what is learnt, and what becomes of those that go wrong."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config, EnvironmentSection
from agent_tunix.environments.base import Environment
from agent_tunix.environments.world import World
from agent_tunix.errors import UserError
from agent_tunix.training import loading
from agent_tunix.training.metrics import Clock
from agent_tunix.training.play import CUT, FAILED, Playing, arrays_of, play
from agent_tunix.training.rollouts import make_batch, sample_groups
from agent_tunix.training.setup import Loaded, prepare

P, G, LONGEST = 2, 2, 64


class Again(Environment):
    """Asks the same question a second time."""

    def reply(self, transcript):
        return transcript[0] if len(transcript) == 1 + 1 else None

    def reward(self, transcript):
        return {"length": float(len(transcript))}


@pytest.fixture(scope="module")
def setup():
    small = f"training.micro_batch_size={P}", f"grpo.num_generations={G}", f"generation.max_generation_steps={LONGEST}"
    short = "evaluation.num_examples=3", "data.num_examples=16", "model.lora_module_path=q_proj", "environment.name=x.Y"
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose("config", ["+experiment=quick_test", *small, *short])
    composed.environment.name = None
    cfg = validate(composed, Config)
    r = prepare(cfg, Loaded(), lambda text: None)
    return r, r.engine.policy(loading.new_state(cfg, r.model).trainable)


def world(kind=Again, **limits) -> World:
    return World(kind, EnvironmentSection(name=f"tests.{kind.__name__}", **limits))


def played(setup, kind=Again, temperature=1.0, **limits):
    r, policy = setup
    examples = r.task.train[:P]
    playing = Playing.of(r.cfg, world(kind, **limits), r.model.tokenizer)
    return play(r.engine, policy, playing, examples, jax.random.key(3), r.sampling, temperature)


def test_a_turn_goes_on_from_the_ids_that_were_sampled(setup):
    """The whole reads as the chat template writes the conversation, but for what the model spelt otherwise."""
    r, _ = setup
    tokenizer = r.model.tokenizer
    for episode in played(setup):
        question, first, again, second = episode.messages
        assert [m["role"] for m in episode.messages] == ["user", "assistant", "user", "assistant"]
        assert question == again
        ids = np.array(episode.ids)
        said = np.split(ids, np.flatnonzero(np.diff(episode.learnt)) + 1)
        assert [tokenizer.decode(said[0].tolist()), tokenizer.decode(said[2].tolist())] == [
            first["content"],
            second["content"],
        ]
        assert episode.prompt_ids == tokenizer.encode(tokenizer.chat.prompt(question["content"]))
        between = tokenizer.encode(tokenizer.chat.conversation([question, first, again]))
        written = [*episode.prompt_ids, *tokenizer.encode(first["content"] + tokenizer.ending), *said[1].tolist()]
        assert written == between
        assert (episode.turns, episode.ending, episode.rewards) == (2, "", {"length": 4.0})


def test_the_trainer_gives_the_sampled_tokens_the_probabilities_that_the_sampler_gave(setup):
    r, policy = setup
    r = dataclasses.replace(r, world=world(), sampling=dataclasses.replace(r.sampling, top_k=None))
    (sampled,) = sample_groups(r, policy, 0, Clock())
    batch = sampled.batch
    found = np.asarray(r.engine.policy_logprobs(policy, batch))
    learnt = np.asarray(batch.learnt_BC)
    assert 0 < learnt.sum() < np.asarray(batch.mask_BC).sum(), "the world's words are attended to, and not learnt"
    np.testing.assert_allclose(found[learnt], np.asarray(batch.old_logprobs_BC)[learnt], atol=1e-4)
    weights = np.asarray(make_batch(r, policy, 0, [sampled]).batch.weights_BC)
    assert ((weights > 0) == learnt).all()
    assert weights.sum() == pytest.approx(1)


def test_episodes_are_the_same_whenever_they_are_played(setup):
    first, second = played(setup), played(setup)
    assert [episode.ids for episode in first] == [episode.ids for episode in second]


def test_one_that_goes_on_is_cut_at_its_last_turn_and_one_too_long_at_its_last_token(setup):
    class Endless(Again):
        def reply(self, transcript):
            return transcript[0]

    assert {(e.turns, e.ending) for e in played(setup, Endless, max_turns=1)} == {(1, CUT)}
    found = played(setup, Endless, max_turns=50)
    assert {episode.ending for episode in found} == {CUT}
    assert max(len(episode.ids) for episode in found) <= LONGEST


def test_one_that_fails_is_marked_and_the_others_go_on(setup):
    class Broken(Again):
        made = 0

        def __init__(self):
            Broken.made += 1
            self.first = Broken.made == 1

        def reply(self, transcript):
            if self.first:
                raise ValueError("no more")
            return super().reply(transcript)

    one, *others = played(setup, Broken)
    assert (one.ending, one.fault, one.rewards) == (FAILED, "reply raised ValueError: no more", {})
    assert [(episode.ending, episode.turns) for episode in others] == [("", 2)] * 3


def test_a_world_in_which_every_episode_fails_ends_the_run(setup):
    class Silent(Again):
        def reply(self, transcript):
            return 7

    with pytest.raises(UserError, match="every episode of a batch failed; of the first, reply gave a int, not messages"):
        played(setup, Silent)


def test_episodes_of_a_row_that_begin_differently_are_refused(setup):
    class Moody(Again):
        made = 0

        def __init__(self):
            Moody.made += 1
            self.number = Moody.made

        def reset(self, row):
            return [{"role": "user", "content": row["question"] * (1 + self.number % 2)}]

    with pytest.raises(UserError, match="reset gave different messages for one row"):
        played(setup, Moody)


class OneFails(Again):
    """The first of each row; the others are worth what the last digit of their number says."""

    made = -1

    def __init__(self):
        OneFails.made += 1
        self.number = OneFails.made % G

    def reply(self, transcript):
        if self.number == 0:
            raise ValueError
        return None


@pytest.mark.parametrize("unfinished", ["zero", "leave"])
def test_an_unfinished_episode_is_worth_nothing_or_leaves_its_group(setup, unfinished):
    r, policy = setup
    section = EnvironmentSection(name="tests.OneFails", unfinished=unfinished)
    cfg = r.cfg.model_copy(update={"environment": section})
    r = dataclasses.replace(r, cfg=cfg, world=World(OneFails, section))
    _ = r.world.schemas  # of an instance that plays nothing
    OneFails.made = -1
    made = make_batch(r, policy, 0, sample_groups(r, policy, 0, Clock()))
    advantages = np.asarray(made.batch.advantages_B).reshape(P, G)
    learnt = np.asarray(made.batch.learnt_BC).any(axis=1).reshape(P, G)
    assert made.record["episode/failed"] == 1 / G
    if unfinished == "leave":  # one alone has none to be compared with
        assert not advantages.any()
        assert learnt.tolist() == [[False, True]] * P
    else:
        assert (advantages[:, 0] < 0).all()
        assert (advantages[:, 1] > 0).all()
        assert learnt.all()


def test_arrays_hold_each_episode_in_its_row(setup):
    r, _ = setup
    episodes = played(setup)
    made = arrays_of(episodes, G, Playing.of(r.cfg, world(), r.model.tokenizer), LONGEST, r.engine)
    for row, episode in enumerate(episodes):
        assert made.tokens_BC[row][made.mask_BC[row]].tolist() == episode.ids
        assert made.learnt_BC[row].sum() == sum(episode.learnt)
        prompt = np.asarray(made.prompts.tokens_PS)[row // G]
        assert prompt[np.asarray(made.prompts.positions_PS)[row // G] >= 0].tolist() == episode.prompt_ids


def test_what_the_prompt_shows_of_an_assistant_is_not_the_models_own(setup):
    class Shown(Again):
        def reset(self, row):
            shown = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": "<answer>7</answer>"}]
            return [*shown, {"role": "user", "content": row["question"]}]

        def reply(self, transcript):
            return None

    r, policy = setup
    playing = dataclasses.replace(Playing.of(r.cfg, world(Shown), r.model.tokenizer), longest=128)
    for episode in play(r.engine, policy, playing, r.task.train[:P], jax.random.key(3), r.sampling, 1.0):
        problem = episode.problem()
        assert (len(problem.asked), [m["role"] for m in problem.said]) == (3, ["assistant"])
        assert problem.completion == problem.said[0]["content"]
