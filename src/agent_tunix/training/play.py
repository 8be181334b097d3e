"""Episodes in an environment, played turn by turn.

The turns of all episodes go through the sampler together, and episodes that are over leave. A turn goes on from the very ids
that were sampled, and what the world says is put behind them: nothing is ever made into tokens twice. The model attends to
all of an episode, and learns its own tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from agent_tunix.config.schema import Config
from agent_tunix.engine import distributed
from agent_tunix.engine.batch import bucket
from agent_tunix.engine.engine import Inference
from agent_tunix.engine.sampler import Sampling
from agent_tunix.environments.base import Environment
from agent_tunix.environments.reward_call import Problem
from agent_tunix.environments.stream import Example, left_padded
from agent_tunix.environments.tool_formats import Format
from agent_tunix.environments.world import Calls, Fault, World, reply, reset, rewards_of
from agent_tunix.errors import UserError
from agent_tunix.models.chat import Message
from agent_tunix.models.lora import Policy
from agent_tunix.models.sharding import lay_rows
from agent_tunix.models.tokenizer import Tokenizer
from agent_tunix.types import Prompts, Record

CUT, FAILED = "cut", "failed"


@dataclasses.dataclass
class Episode:
    """One playing of a row: `ids` are all tokens behind its prompt, of which the model has said those under `learnt`.

    `ending` is empty for an episode that is over, `cut` for one that was stopped by a limit, `failed` for one whose
    environment went wrong; `fault` then says how.
    """

    example: Example
    environment: Environment
    messages: list[Message]
    asked: int = 0  # messages of the prompt
    prompt_ids: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    learnt: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    turns: int = 0
    over: bool = False
    ending: str = ""
    fault: str = ""
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    solved: float | None = None

    @property
    def answer(self) -> str:
        """The model's last message."""
        return next((m["content"] for m in reversed(self.said) if m["role"] == "assistant"), "")

    @property
    def said(self) -> list[Message]:
        """All messages behind the prompt."""
        return self.messages[self.asked :]

    def problem(self) -> Problem:
        """As reward functions ask for it."""
        example, asked = self.example, self.messages[: self.asked]
        environment = getattr(self.environment, "world", self.environment)
        return Problem(example.question, self.answer, example.answer, example.row, asked, self.said, environment)

    @property
    def calls(self) -> list[Message]:
        """All calls of tools that the model has made."""
        return [call for message in self.said for call in message.get("tool_calls", ())]

    def end(self, ending: str = "", fault: str = "") -> None:
        self.over, self.ending, self.fault = True, ending, fault


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a policy has said to some problems, `texts` by problem and pass.

    Of episodes in a world, `solved` says how far the world takes each for solved, where it does, `record` what they were
    like, and `transcripts` what was said behind the prompt in the first of each problem.
    """

    texts: list[list[str]]
    solved: list[float | None] = dataclasses.field(default_factory=list)
    record: Record = dataclasses.field(default_factory=dict)
    transcripts: list[list[Message]] = dataclasses.field(default_factory=list)


def turns_of(transcript: Sequence[Message]) -> list[tuple[str, str]]:
    """Who says what: a role or the name of a tool, and the text."""
    return [(str(message.get("name") or message["role"]), str(message["content"])) for message in transcript]


@dataclasses.dataclass(frozen=True)
class Playing:
    """A world, and how its messages become prompts of one model."""

    world: World
    tokenizer: Tokenizer
    system_prompt: str
    thinking: bool | None
    longest: int  # prompt, in tokens

    @classmethod
    def of(cls, cfg: Config, world: World, tokenizer: Tokenizer) -> Playing:
        """As a configuration asks."""
        data = cfg.data
        return cls(world, tokenizer, data.system_prompt, data.enable_thinking, cfg.generation.max_prompt_length)

    @property
    def format(self) -> Format:
        """How the model writes calls of tools."""
        return self.world.format(self.tokenizer.chat.template.source)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        schemas = self.world.schemas
        told = self.format.told(schemas) if schemas else ""
        return self.tokenizer.encode(self.tokenizer.chat.asked(messages, self.system_prompt, self.thinking, schemas, told))

    def continued(self, replies: Sequence[Message]) -> list[int]:
        text = self.tokenizer.chat.continued(replies, self.tokenizer.ending, self.thinking, self.world.schemas)
        return self.tokenizer.encode(text)


def play(
    engine: Inference,
    policy: Policy,
    playing: Playing,
    examples: Sequence[Example],
    key: jax.Array,
    sampling: Sampling,
    temperature: float,
) -> list[Episode]:
    """`num_generations` episodes of each row, one row's after another's, played to their ends and rewarded."""
    world, calls = playing.world, Calls(playing.world.section.timeout)
    episodes = _begun(playing, examples, sampling.num_generations, calls)
    for turn in range(world.section.max_turns):
        live = [episode for episode in episodes if not episode.over]
        if not live:
            break
        _speak(engine, policy, episodes, live, playing, jax.random.fold_in(key, turn), sampling, temperature, turn)
        _listen(playing, [episode for episode in live if not episode.over], sampling, calls)
    for episode in episodes:
        if not episode.over:
            episode.end(CUT, f"it went on after environment.max_turns={world.section.max_turns}")
    _rewarded(episodes, calls)
    if all(episode.ending == FAILED for episode in episodes):
        raise UserError(
            f"environment.name={world.section.name}: every episode of a batch failed; of the first, {episodes[0].fault}.\n"
            "Mend the environment; its episodes are what is learnt from."
        )
    return episodes


def _begun(playing: Playing, examples: Sequence[Example], G: int, calls: Calls) -> list[Episode]:
    """The episodes with their prompts, which must be the same for all of a row."""
    rows = [example for example in examples for _ in range(G)]
    world = playing.world
    made = calls.made([world.make for _ in rows])
    if faults := [one for one in made if isinstance(one, Fault)]:
        raise UserError(f"environment.name={world.section.name}: an instance {faults[0].said}.")
    worlds = [one for one in made if not isinstance(one, Fault)]
    begun = calls.made([partial(reset, one, example.row) for one, example in zip(worlds, rows, strict=True)])
    episodes = []
    for one, example, messages in zip(worlds, rows, begun, strict=True):
        begun_with = [] if isinstance(messages, Fault) else messages
        episode = Episode(example, one, begun_with, len(begun_with))
        if isinstance(messages, Fault):
            episode.end(FAILED, f"reset {messages.said}")
        episodes.append(episode)
    for start in range(0, len(episodes), G):
        _asked(episodes[start : start + G], playing)
    return episodes


def _asked(group: Sequence[Episode], playing: Playing) -> None:
    """Gives the episodes of a row their prompt; where it is too long none of them is played."""
    asked = [episode.messages for episode in group if episode.messages]
    if any(messages != asked[0] for messages in asked):
        raise UserError(
            f"environment.name={playing.world.section.name}: reset gave different messages for one row.\n"
            "The episodes of a row are compared with each other, so they must begin alike: have all follow from the row."
        )
    ids = playing.prompt(asked[0]) if asked else []
    for episode in group:
        episode.prompt_ids = ids[-playing.longest :] or [playing.tokenizer.pad_id]
        if len(ids) > playing.longest and not episode.over:
            episode.end(
                FAILED, f"its prompt has {len(ids)} tokens, more than generation.max_prompt_length={playing.longest}"
            )


def _speak(
    engine: Inference,
    policy: Policy,
    episodes: Sequence[Episode],
    live: Sequence[Episode],
    playing: Playing,
    key: jax.Array,
    sampling: Sampling,
    temperature: float,
    turn: int,
) -> None:
    """One turn of the model in all episodes that go on."""
    tokenizer, G = playing.tokenizer, sampling.num_generations
    if turn == 0:  # a prompt is read once for its group
        asked = [episode.prompt_ids for episode in episodes[::G]]
        spoken, speakers = sampling, list(range(len(episodes)))
    else:
        rows = min(-(-bucket(len(live), len(episodes)) // _cut(engine)) * _cut(engine), len(episodes))
        texts = [[*episode.prompt_ids, *episode.ids] for episode in live]
        asked = texts + [texts[-1]] * (rows - len(texts))
        left = sampling.max_steps - min(len(episode.ids) for episode in live)
        spoken = dataclasses.replace(sampling, num_generations=1, max_steps=bucket(left, sampling.max_steps))
        place = {id(episode): index for index, episode in enumerate(episodes)}
        speakers = [place[id(episode)] for episode in live]
    width = _width(max(map(len, asked)), playing.longest + sampling.max_steps)
    drawn = engine.sample(policy, _padded(asked, width, engine, tokenizer), key, spoken, temperature)
    tokens_BC, logprobs_BC = distributed.whole(drawn.tokens_BC), distributed.whole(drawn.logprobs_BC)
    lengths_B, ended_B = distributed.whole(drawn.mask_BC).sum(axis=1), distributed.whole(drawn.ended_B)
    for row, index in enumerate(speakers):
        episode = episodes[index]
        if episode.over:
            continue
        length = min(int(lengths_B[row]), sampling.max_steps - len(episode.ids))
        ids = tokens_BC[row, :length].tolist()
        episode.ids += ids
        episode.logprobs += logprobs_BC[row, :length].tolist()
        episode.learnt += [True] * length
        episode.turns += 1
        episode.messages = [*episode.messages, {"role": "assistant", "content": tokenizer.decode(ids)}]
        if not ended_B[row] or length < lengths_B[row]:
            episode.end(CUT, f"it has more tokens than generation.max_generation_steps={sampling.max_steps}")


def _listen(playing: Playing, live: Sequence[Episode], sampling: Sampling, calls: Calls) -> None:
    """What the world answers to the turn of each episode, put behind it."""
    schemas, parse = playing.world.schemas, playing.format.parse
    for episode in live:
        if schemas and (asked := parse(episode.messages[-1]["content"], schemas)):
            episode.messages[-1] = {**episode.messages[-1], "tool_calls": asked}
    found = calls.made([partial(reply, episode.environment, tuple(episode.messages)) for episode in live])
    for episode, replies in zip(live, found, strict=True):
        if isinstance(replies, Fault):
            episode.end(FAILED, f"reply {replies.said}")
        elif not replies:
            episode.end()
        else:
            ids = playing.continued(replies)
            episode.messages = [*episode.messages, *replies]
            if len(episode.ids) + len(ids) >= sampling.max_steps:
                episode.end(CUT, f"it has more tokens than generation.max_generation_steps={sampling.max_steps}")
                continue
            episode.ids += ids
            episode.learnt += [False] * len(ids)
            episode.logprobs += [0.0] * len(ids)


def _rewarded(episodes: Sequence[Episode], calls: Calls) -> None:
    """What each environment gives to its episode, also to one that was cut."""
    played = [episode for episode in episodes if episode.ending != FAILED]
    found = calls.made([partial(rewards_of, episode.environment, tuple(episode.messages)) for episode in played])
    for episode, given in zip(played, found, strict=True):
        if isinstance(given, Fault):
            episode.end(FAILED, f"reward {given.said}")
        else:
            episode.rewards, episode.solved = given


def _width(longest: int, most: int) -> int:
    """Tokens to which texts are padded: few widths, as each is a program of its own."""
    width = 16
    while width < longest:
        width = width * 3 // 2 if width & (width - 1) == 0 else width * 4 // 3
    return min(width, -(-most // 4) * 4)


def _padded(asked: Sequence[Sequence[int]], width: int, engine: Inference, tokenizer: Tokenizer) -> Prompts:
    parts = left_padded(asked, width, tokenizer.pad_id)
    return Prompts(*(lay_rows(part.__getitem__, part.shape, engine.model.mesh) for part in parts))


def _cut(engine: Inference) -> int:
    return engine.model.mesh.shape["fsdp"]


@dataclasses.dataclass(frozen=True)
class Played:
    """Episodes as arrays: what the update reads of them."""

    prompts: Prompts
    tokens_BC: np.ndarray
    mask_BC: np.ndarray
    learnt_BC: np.ndarray
    logprobs_BC: np.ndarray


def arrays_of(episodes: Sequence[Episode], G: int, playing: Playing, longest: int, engine: Inference) -> Played:
    """Prompts padded on the left, what follows them on the right; of an episode that failed nothing is learnt."""
    prompts = [episode.prompt_ids for episode in episodes[::G]]
    width = bucket(max(len(episode.ids) for episode in episodes), longest)
    shape = len(episodes), width
    tokens, mask, learnt = np.full(shape, playing.tokenizer.pad_id, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    for row, episode in enumerate(episodes):
        length = len(episode.ids)
        tokens[row, :length], mask[row, :length] = episode.ids, True
        learnt[row, :length], logprobs[row, :length] = episode.learnt, episode.logprobs
    padded = _padded(prompts, _width(max(map(len, prompts)), playing.longest), engine, playing.tokenizer)
    return Played(padded, tokens, mask, learnt, logprobs)
