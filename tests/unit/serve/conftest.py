"""The shipped model, served within this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

import agent_tunix
from agent_tunix.engine.engine import Inference
from agent_tunix.models.base import Model
from agent_tunix.models.tokenizer import Tokenizer
from agent_tunix.serve.asking import Asking
from agent_tunix.serve.opened import Opened
from agent_tunix.serve.scheduler import Scheduler

NAME = "package:tiny"


@pytest.fixture(scope="package")
def policy() -> agent_tunix.Policy:
    return agent_tunix.load(NAME)


@pytest.fixture(scope="package")
def model(policy) -> Model:
    return policy._inference.model


@pytest.fixture(scope="package")
def tokenizer(model) -> Tokenizer:
    return model.tokenizer


@pytest.fixture(scope="package")
def scheduler(model) -> Iterator[Scheduler]:
    found = Scheduler(Inference(model), (model.weights, None), max_batch=64, max_length=256)
    yield found
    found.close()


@pytest.fixture(scope="package")
def asking(model, scheduler) -> Asking:
    return Asking(Opened(NAME, Inference(model), (model.weights, None), "", None, None), scheduler)


@pytest.fixture(scope="package")
def address(asking) -> Iterator[str]:
    """Where the model is served."""
    uvicorn = pytest.importorskip("uvicorn")
    from agent_tunix.serve.app import app_of

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        app = app_of(asking, ("127.0.0.1", "localhost"))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", loop="asyncio", http="h11"))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        serving.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        serving.join()
