"""Images in requests of agents: they become paths of the store, and the rows score as they were sampled."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from support.agent_sessions import largest_difference
from support.vision_models import build, picture
from torchrl_rloo.agents import PolicyEndpoint
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.segments import split_segments
from torchrl_rloo.engines import TransformersEngine
from torchrl_rloo.envs import ChatEnv
from torchrl_rloo.images.shown import data_uri
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper


class World:
    """Endpoint of a tiny vision-language model, with one conversation whose query has an image."""

    def __init__(self, folder: Any, family: str = "qwen2_5_vl"):
        self.model, self.tokenizer, self.store = build(family, folder)
        self.paths = [self.store.add(picture(*size, seed)) for seed, size in enumerate([(40, 24), (16, 32)])]
        self.engine = TransformersEngine(self.model, self.tokenizer)
        policy = vLLMWrapper(self.engine, tokenizer=self.tokenizer, generate_kwargs={"max_new_tokens": 5})
        self.endpoint = PolicyEndpoint(policy, ChatEnv(self.tokenizer))
        self.query = [
            {"role": "user", "content": [{"type": "image", "url": self.paths[0]}, {"type": "text", "text": "?"}]}
        ]
        self.conversation = self.endpoint.open(self.query, seed=1)

    def send(self, body: dict, path: str = "/chat/completions") -> tuple[int, Any]:
        context = self.conversation.context
        headers = {"Authorization": f"Bearer {context.api_key}", "Content-Type": "application/json"}
        try:
            with urlopen(Request(context.base_url + path, json.dumps(body).encode(), headers), timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except HTTPError as error:
            return error.code, json.loads(error.read())

    def close(self) -> None:
        self.endpoint.close()
        self.engine.close()


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def parts(form: str, path: str, text: str) -> list[dict]:
    url = data_uri(path)
    if form == "chat":
        return [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}}, {"type": "text", "text": text}]
    if form == "responses":
        return [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return [{"type": "image", "source": source}, {"type": "text", "text": text}]


def ask(world: World, form: str, messages: list[dict]) -> str:
    if form == "responses":
        status, reply = world.send({"model": "m", "input": messages}, "/responses")
        assert status == 200, reply
        return "".join(p["text"] for item in reply["output"] for p in item.get("content", ()))
    path = "/chat/completions" if form == "chat" else "/messages"
    status, reply = world.send({"model": "m", "messages": messages, "max_tokens": 5}, path)
    assert status == 200, reply
    if form == "chat":
        return reply["choices"][0]["message"]["content"] or ""
    return "".join(block["text"] for block in reply["content"])


@pytest.mark.parametrize("form", ["chat", "responses", "messages"])
def test_a_conversation_with_images_is_one_sample(form: str, world: World) -> None:
    messages = [{"role": "user", "content": parts(form, world.paths[0], "?")}]
    messages.append({"role": "assistant", "content": ask(world, form, messages)})
    messages.append({"role": "user", "content": parts(form, world.paths[1], "and this?")})
    ask(world, form, messages)
    # A call that begins another sample, without images
    ask(world, form, [{"role": "user", "content": "b"}])
    row = world.conversation.finish(reward=1.0)
    rows = split_segments(stack_rows([row]))
    found = [[] if (images := r.get(keys.IMAGES, None)) is None else images for r in rows.unbind(0)]
    assert sorted(map(len, found)) == [0, 2]
    assert [world.tokenizer.images.paths(images) for images in found if len(images)] == [world.paths]
    assert largest_difference(rows, TransformersWrapper(world.model, tokenizer=world.tokenizer, generate=False)) < 1e-5


def test_only_data_is_accepted(world: World, tmp_path) -> None:
    picture(8, 8).save(tmp_path / "secret.png")
    for url in ("https://example.org/a.png", str(tmp_path / "secret.png"), f"file://{tmp_path}/secret.png", None):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        status, reply = world.send({"model": "m", "messages": [{"role": "user", "content": content}]})
        assert status == 400 and "send a data: URI" in reply["error"]["message"]
    source = {"type": "url", "url": "https://example.org/a.png"}
    content = [{"type": "image", "source": source}]
    status, reply = world.send(
        {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}, "/messages"
    )
    assert status == 400 and "send base64" in reply["error"]["message"]
    # What is no image is refused before the policy samples; so is an image in another role
    bad = "data:image/png;base64," + base64.b64encode(b"no image").decode()
    content = [{"type": "image_url", "image_url": {"url": bad}}]
    status, reply = world.send({"model": "m", "messages": [{"role": "user", "content": content}]})
    assert status == 400 and "is no PNG" in reply["error"]["message"]
    messages = [{"role": "system", "content": content}, {"role": "user", "content": "a"}]
    status, reply = world.send({"model": "m", "messages": messages})
    assert status == 400 and "only the user and tools may send images" in reply["error"]["message"]
    assert not world.endpoint.counts["agent/calls"]


def test_a_policy_of_text_refuses_images(random_model, bpe) -> None:
    engine = TransformersEngine(random_model, bpe)
    endpoint = PolicyEndpoint(vLLMWrapper(engine, tokenizer=bpe, generate_kwargs={"max_new_tokens": 2}), ChatEnv(bpe))
    here = World.__new__(World)
    here.endpoint, here.engine = endpoint, engine
    here.conversation = endpoint.open([{"role": "user", "content": "a"}], seed=1)
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    status, reply = here.send({"model": "m", "messages": [{"role": "user", "content": content}]})
    assert status == 400 and "the policy reads text only" in reply["error"]["message"]
    here.close()
