"""The `agent-tunix` command, one verb per workflow; `run_training.py` and `evaluate.py` are its verbs train and evaluate.

Hydra composes the configuration; this module decides where a run's folder is and how a mistake is shown.
"""

from __future__ import annotations

from agent_tunix import signals

with signals.heeded_by(signals.leave):  # what follows takes time to load
    import atexit
    import contextlib
    import gc
    import os
    import sys
    import typing
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import JobReturn
    from hydra.types import RunMode
    from omegaconf import DictConfig

    from agent_tunix.config import hydra_messages, load, output_folders
    from agent_tunix.config.launch import Launch, launched
    from agent_tunix.config.load import as_given, did_you_mean, hydra_arguments, search_path, validate
    from agent_tunix.config.output_folders import relative
    from agent_tunix.config.resumed import anchored
    from agent_tunix.config.schema import ChatConfig, Config, ExportConfig, ServeConfig
    from agent_tunix.console import Screen, unhindered
    from agent_tunix.engine import heartbeat
    from agent_tunix.errors import DivergenceError, StoppedError, UserError, insist_on_interrupts, mistake_of
    from agent_tunix.lab.tune.config import LrFindConfig, TuneConfig

    console = Screen()
    atexit.register(signals.heed, signals.SIG_IGN)  # at the very end Python forgets handlers, and a signal would kill it


def train() -> None:
    """Trains a model; see `python run_training.py --help`. With --dry-run it shows what a run would do, as `plan`."""
    sys.argv[1:] = ["dry_run=true" if argument == "--dry-run" else argument for argument in sys.argv[1:]]
    _hydra("config", _train, several=True)


def plan() -> None:
    """Shows what a run would do: updates, learning rate, memory, warnings; see `agent-tunix plan --help`."""
    sys.argv.append("dry_run=true")
    train()


def lr_find() -> None:
    """Suggests a learning rate from one short run that ramps it; see `agent-tunix lr-find --help`."""
    _hydra("lr_find", _lr_find)


def tune() -> None:
    """Finds learning rate, warm-up and weight decay within a budget; see `agent-tunix tune --help`."""
    _hydra("tune", _tune)


def evaluate() -> None:
    """Evaluates a run or a base model; see `python evaluate.py --help`."""
    as_json = "--json" in sys.argv
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != "--json"]
    _hydra("evaluate", _evaluate_as_json if as_json else _evaluate, several=True)


def export() -> None:
    """Writes a run's adapter or merged model for other tools; see `agent-tunix export --help`."""
    _hydra("export", _export)


def serve() -> None:
    """Serves a run's model to clients of OpenAI's interface; see `agent-tunix serve --help`."""
    _hydra("serve", _serve)


def chat() -> None:
    """Talks with a run's model in the terminal; see `agent-tunix chat --help`."""
    _hydra("chat", _chat)


def doctor() -> None:
    """Says what is wrong with a run or a sweep, from its folder; see `agent-tunix doctor --help`."""
    with _command():
        from agent_tunix.lab.doctor import doctor as workflow

        workflow.main(sys.argv[1:], console)


def compare() -> None:
    """Says which of two runs solves more of the same problems, and how sure that is; see `agent-tunix compare --help`."""
    with _command():
        from agent_tunix.lab.compare import compare as workflow

        workflow.main(sys.argv[1:], console)


def report() -> None:
    """Writes report.html, one page on a run, a sweep or a tune; see `agent-tunix report --help`."""
    with _command():
        from agent_tunix.lab.report import page

        page.main(sys.argv[1:], console)


def watch() -> None:
    """Shows the report live in a browser while training runs; see `agent-tunix watch --help`."""
    with _command():
        from agent_tunix.lab.report import watch as workflow

        workflow.main(sys.argv[1:], console)


def runs() -> None:
    """Lists runs with status, best accuracy and age; see `agent-tunix runs --help`."""
    with _command():
        from agent_tunix.lab.runs import runs as workflow

        workflow.main(sys.argv[1:], console)


def env() -> None:
    """Prints what a report of a bug needs: versions, devices, caches, system; see `agent-tunix env --help`."""
    with _command():
        from agent_tunix.lab import environment_report

        environment_report.main(sys.argv[1:], console)


def main() -> None:
    """`agent-tunix <verb> <overrides>`."""
    verbs = {"train": train, "plan": plan, "lr-find": lr_find, "tune": tune, "evaluate": evaluate, "export": export}
    verbs |= {"serve": serve, "chat": chat, "doctor": doctor, "compare": compare, "report": report, "watch": watch}
    verbs |= {"runs": runs, "env": env}
    verb = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if verb in ("--version", "version"):
        import agent_tunix

        return print(f"agent-tunix {agent_tunix.__version__}")
    if verb not in verbs:
        usage = "\n".join(
            f"  agent-tunix {name:10} {(function.__doc__ or '').split(';')[0]}" for name, function in verbs.items()
        )
        asked = verb.strip("-") in ("", "help", "h")
        wrong = "" if asked else f"'{verb}' is not a verb of agent-tunix{did_you_mean(verb, verbs)}\n"
        with unhindered():
            print(f"{wrong}usage:\n{usage}", file=sys.stderr)
        sys.exit(2 if wrong else 0)
    verbs[verb]()


def _train(composed: DictConfig) -> float | None:
    """Returns the held-out accuracy, by which Hydra's sweepers search."""
    from agent_tunix import verbs

    request = verbs.Request.of_job(composed)
    cfg, origin = verbs.training_of(request)
    if cfg.dry_run:
        verbs.show_plan(request, cfg, origin, console)
        return None
    _, summary = verbs.train(request, cfg, origin, console)
    return _accuracy(summary)


def run_sweep(composed: Sequence[JobReturn], folder: Path, fuse: str) -> list[float]:
    """Trains the jobs that Hydra has composed, as one sweep in a folder; returns the held-out accuracy of each."""
    from agent_tunix.lab.sweep import sweep
    from agent_tunix.training import loading

    _freeze()
    if fuse not in typing.get_args(sweep.Fuse):
        raise UserError(f"hydra.launcher.fuse={fuse}: must be one of {', '.join(typing.get_args(sweep.Fuse))}")
    jobs = [
        sweep.Job(
            loading.described(anchored(cfg)),
            relative(Path(job.hydra_cfg.hydra.runtime.output_dir)),  # type: ignore[union-attr]
            as_given(job.overrides or ()),
        )
        for cfg, job in zip(load.validate_all((job.cfg for job in composed), Config), composed, strict=True)  # type: ignore[misc]
    ]
    return [_accuracy(summary) for summary in sweep.run(jobs, relative(folder), console, typing.cast(sweep.Fuse, fuse))]


def close_sweep(folder: Path) -> None:
    """Sums up a sweep that any launcher has run."""
    from agent_tunix.lab.sweep import sweep_closing
    from agent_tunix.training.guard import Interruption

    with Interruption():  # all jobs have ended, and this soon has
        sweep_closing.close(relative(folder), console)


def _freeze() -> None:
    """Keeps the garbage collector from what a command has imported, which stays: else it takes a tenth of all tracing."""
    from agent_tunix.training import loop  # noqa: F401  # with all that a command is made of

    gc.freeze()


def _accuracy(summary: Mapping[str, typing.Any]) -> float:
    """The last accuracy of a run; one that diverged is worth nothing, even where it went on at a tenth of its rate."""
    final = summary.get("final_eval")
    return final["accuracy"] if final and summary["status"] != "diverged" and not summary.get("rollbacks") else 0.0


def _lr_find(composed: DictConfig) -> None:
    from agent_tunix.lab.lr_find import lr_find as workflow
    from agent_tunix.training import loading

    cfg, output = (
        loading.described(anchored(validate(composed, LrFindConfig))),
        relative(Path(HydraConfig.get().runtime.output_dir)),
    )
    workflow.run(cfg, output, console, as_given(HydraConfig.get().overrides.task))


def _tune(composed: DictConfig) -> None:
    from agent_tunix.lab.tune import tune as workflow
    from agent_tunix.training import loading

    cfg, output = (
        loading.described(anchored(validate(composed, TuneConfig))),
        relative(Path(HydraConfig.get().runtime.output_dir)),
    )
    workflow.run(cfg, output, console, as_given(HydraConfig.get().overrides.task))


def _evaluate(composed: DictConfig) -> None:
    from agent_tunix import verbs

    verbs.evaluate(verbs.Request.of_job(composed), console)


def _evaluate_as_json(composed: DictConfig) -> None:
    """Prints each record as a line of JSON, and all words for people on standard error."""
    import json

    from agent_tunix import verbs
    from agent_tunix.engine import distributed
    from agent_tunix.training.intervals import intervals

    words = Screen(stderr=True)
    words.quiet = console.quiet
    for record in verbs.evaluate(verbs.Request.of_job(composed), words):
        if distributed.first():
            print(json.dumps(record | {"intervals": intervals(record)}))


def _export(composed: DictConfig) -> None:
    from agent_tunix.training import export as workflow

    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError("export writes one folder: leave out --multirun, and start it once for each run.")
    workflow.run(validate(composed, ExportConfig), console)


def _serve(composed: DictConfig) -> None:
    from agent_tunix.serve import server

    _refuse_sweep("serve")
    server.run(anchored(validate(composed, ServeConfig)), HydraConfig.get().overrides.task, console)


def _chat(composed: DictConfig) -> None:
    from agent_tunix.serve import chat as workflow

    _refuse_sweep("chat")
    workflow.run(anchored(validate(composed, ChatConfig)), HydraConfig.get().overrides.task, console)


def _refuse_sweep(verb: str) -> None:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise UserError(f"{verb} asks one model: leave out --multirun, and start it once for each run.")


def _hydra(config_name: str, task: Callable[[DictConfig], float | None], several: bool = False) -> None:
    """Runs a task under Hydra, alone or, where it can be done by `several`, with the other processes of a launch."""
    with _command():
        sys.argv[1:], launch = launched(sys.argv[1:], os.environ)
        if launch is None:
            return _compose(config_name, task)
        if not several or {"--multirun", "-m"} & set(sys.argv):
            raise UserError(_one_process(launch))
        from agent_tunix.engine import distributed

        with distributed.joined(launch), answering():
            console.quiet = not distributed.first()
            _compose(config_name, task)


@contextlib.contextmanager
def _command() -> Iterator[None]:
    """A command: until it has something to save, a signal ends it at once, and so it does when all is done."""
    signals.heed(_stop)
    code = 1
    try:
        with answering():
            yield
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        signals.heed(lambda *_: os._exit(code))  # Python takes its time to end


def _stop(number: int, _: typing.Any) -> typing.NoReturn:
    """Ends a command that has nothing to save, and all processes of its launch."""
    signals.heed(signals.leave)  # a second one does not wait
    output_folders.remove_unused()
    if heartbeat.current:
        heartbeat.current.fail(signals.words(number), signals.STOPPED)
    signals.leave(number)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Shows what the user can mend as a message, without a traceback, and exits with its code."""
    insist_on_interrupts()
    try:
        with unhindered():
            yield
    except (Exception, KeyboardInterrupt) as fault:
        if (of_user := mistake_of(fault)) is None:
            raise
        _fail(of_user)


def _one_process(launch: Launch) -> str:
    return (
        f"This is one of several processes ({launch.launcher}). Together they can train or evaluate one run;\n"
        "sweeps, tune, lr-find, export, serve and chat need a single process: start only one, or add --processes 1."
    )


def _compose(config_name: str, task: Callable[[DictConfig], float | None]) -> None:
    """Has Hydra make the configuration and runs the task; a user's mistake ends in its message and exit code 2."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come to us as they are; what is shown is decided below
    if said := load.unsearched():
        print(said, file=sys.stderr)
    first, *more = search_path(sys.argv[1:])
    sys.argv[1:] = hydra_arguments(sys.argv[1:], *more)

    asked_to_stop: list[int] = []

    def job(composed: DictConfig) -> float | None:
        of_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        with answering():  # here too: Hydra would print the overrides before it passes a mistake on
            try:
                from agent_tunix.training.guard import Interruption

                _freeze()
                asked_to_stop.append(Interruption.requests)
                return task(composed) if asked_to_stop[-1] == asked_to_stop[0] else None  # Ctrl-C is for all jobs
            except DivergenceError as fault:
                if not of_sweep:
                    raise
                print(fault, file=sys.stderr)  # one bad candidate does not end a sweep
                return 0.0
            finally:
                if of_sweep:
                    output_folders.remove_empty([Path(HydraConfig.get().runtime.output_dir)])
                output_folders.remove_unused()  # here too: one of several processes may end without coming back

    try:
        hydra.main(version_base="1.3", config_path=str(first), config_name=config_name)(job)()
    except Exception as mistake:
        if (told := hydra_messages.answer(mistake, sys.argv)) is None:
            raise
        _fail(UserError(told))
    finally:
        output_folders.remove_unused()


def _fail(mistake: UserError) -> typing.NoReturn:
    if heartbeat.current:
        heartbeat.current.fail(str(mistake), mistake.exit_code)
    print(mistake, file=sys.stderr, flush=True)
    if isinstance(mistake, StoppedError):
        os._exit(mistake.exit_code)  # without clean-up: a device that is at work cannot be shut down safely
    sys.exit(mistake.exit_code)


if __name__ == "__main__":
    main()
