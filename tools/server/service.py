"""The engine behind the server, with what every endpoint asks of it."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from octavo.graphs.errors import EngineDeadError, RequestError
from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.prompts import Prompt
from octavo.runtime.sampling.sampling_params import SamplingParams
from octavo.runtime.text.tokenizer import Tokenizer
from octavo.tools.server.errors import ApiError, unavailable
from octavo.tools.server.options import ServerOptions
from octavo.tools.server.tool_calls import ToolCallFormat, tool_call_format

if TYPE_CHECKING:
    from octavo.backends.manifest import Manifest

_Value = TypeVar("_Value")
State = Literal["loading", "ready", "draining"]

# More characters or tokens than this are read in a thread: the streams of others go on meanwhile.
_LONG_TEXT = 4096
# Arguments of a chat template that have a field of their own in a request.
_TEMPLATE_FIELDS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


class Service:
    """One engine, from before it is loaded until it has ended."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self.llm = llm
        self.options = options
        self.state: State = "loading"
        self.created = int(time.time())
        self._manifest: Manifest | None = None
        self._fingerprint = ""

    async def start(self) -> None:
        """Loads the engine. Raises what `AsyncLLM.start` does."""
        from octavo.backends.bundle import MANIFEST_NAME, read_manifest

        await self.llm.start()
        engine = self.llm.engine_path
        self._manifest = read_manifest(engine)
        # The manifest holds the hash of every file: another engine has another fingerprint.
        digest = hashlib.sha256((engine / MANIFEST_NAME).read_bytes()).hexdigest()
        self._fingerprint = f"octavo-{digest[:12]}"
        if self.state == "loading":
            self.state = "ready"

    async def stop(self) -> None:
        """Lets open requests end for `drain_timeout` seconds, then ends them and the engine."""
        self.state = "draining"
        if self._manifest is not None:
            await self.llm.drain(self.options.drain_timeout)
        await self.llm.shutdown()

    @property
    def manifest(self) -> Manifest:
        """ApiError while the engine is loading."""
        self.check_loaded()
        assert self._manifest is not None
        return self._manifest

    def check_loaded(self) -> None:
        """ApiError while the engine is loading."""
        if self._manifest is None:
            raise unavailable("the engine is still loading: try again later")

    def check_available(self) -> None:
        """ApiError unless requests are taken. An engine that is started again takes them."""
        self.check_loaded()
        if self.state == "draining":
            raise unavailable("the server is shutting down: send the request to another one")

    async def check_ready(self) -> None:
        """ApiError unless a request would run now."""
        self.check_available()
        await self.llm.check_health()

    def check_live(self) -> None:
        """ApiError if only a restart of the server can help."""
        if self.state == "ready" and self.llm.is_dead:
            raise EngineDeadError(
                "the engine has died and is not started again: restart the server"
            )

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.options.model_names:
            served = ", ".join(self.options.model_names)
            raise ApiError(
                404,
                f"the model {name!r} is not served here: ask for {served}",
                param="model",
                code="model_not_found",
            )

    def head(self, prefix: str) -> dict[str, Any]:
        """What every completion begins with, and each of its chunks."""
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.options.model_names[0],
            "system_fingerprint": self._fingerprint,
        }

    @property
    def tokenizer(self) -> Tokenizer:
        """RequestError if the engine has none."""
        return self.llm.get_tokenizer()

    @property
    def chat_template(self) -> str | None:
        """Its source, None if the engine has none."""
        try:
            return self.tokenizer.chat_template
        except RequestError:
            return None

    @functools.cached_property
    def tool_calls(self) -> ToolCallFormat | None:
        """How the model writes tool calls; RequestError if its chat template knows no tools."""
        return tool_call_format(self.chat_template, self.options.tool_call_format)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encode = functools.partial(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
        return await _off_the_loop(encode, len(text))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        decode = functools.partial(
            self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens
        )
        return await _off_the_loop(decode, len(token_ids))

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """See `Tokenizer.token_text`."""
        text_of = self.tokenizer.token_text
        return await _off_the_loop(lambda: [text_of(token) for token in token_ids], len(token_ids))

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        **options: Any,
    ) -> dict[str, Any]:
        """See `Tokenizer.chat_prompt`; `variables` are the template's own."""
        if taken := _TEMPLATE_FIELDS & set(variables or ()):
            raise RequestError(
                f"chat_template_kwargs holds {min(taken)!r}: give it as a field of the request"
            )
        if "developer" not in (self.chat_template or ""):
            # OpenAI's newer name of the role, which few templates know.
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in messages
            ]
        render = functools.partial(
            self.tokenizer.chat_prompt, messages, **options, **(variables or {})
        )
        length = sum(len(str(message)) for message in messages)
        return await _off_the_loop(render, length)

    async def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, priority: int
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """The outputs of all prompts as they come, each with its prompt's number.

        The first error of any ends them all. Closing it aborts what is left.
        """
        if len(prompts) == 1:
            async with aclosing(self.llm.generate(prompts[0], params, priority=priority)) as stream:
                async for output in stream:
                    yield 0, output
            return
        news: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(1)

        async def read(index: int, prompt: Prompt) -> None:
            try:
                async for output in self.llm.generate(prompt, params, priority=priority):
                    await news.put((index, output))
            except Exception as error:
                await news.put((index, error))

        readers = [asyncio.create_task(read(*numbered)) for numbered in enumerate(prompts)]
        num_open = len(readers)
        try:
            while num_open:
                index, new = await news.get()
                if isinstance(new, Exception):
                    raise new
                yield index, new
                num_open -= new.finished
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)


async def _off_the_loop(work: Callable[[], _Value], size: int) -> _Value:
    if size <= _LONG_TEXT:
        return work()
    return await asyncio.to_thread(work)
