"""`octavo chat`: a conversation in the terminal; each answer says what the prefix cache saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.graphs.errors import OctavoError, RequestError
from octavo.tools import chat_notes, options, speculative_options
from octavo.tools.chat_terminal import ChatTerminal
from octavo.tools.console import print_tables, reports_errors
from octavo.tools.conversation import Conversation, Exchange

if TYPE_CHECKING:
    from octavo.runtime import LLM, RequestOutput, SamplingParams
    from octavo.runtime.prompts import Prompt

DEFAULT_MAX_TOKENS = 1024
_SEED_LIMIT = 1 << 64

HELP = """\
/help         this list
/clear        forget the conversation, not the system message
/system TEXT  set the system message; without TEXT, have none
/retry        answer the last message anew, with the next seed
/save FILE    write the conversation to FILE as a JSON list of messages
/stats        what the engine has done so far
/quit         end the chat, as Ctrl-D does
Ctrl-C interrupts an answer and keeps what was said; a second Ctrl-C ends the chat.
A line that ends in a backslash goes on in the next one.
A message that begins with / is written with two: //"""


@reports_errors
def chat(
    engine: options.EngineArgument,
    system: Annotated[
        str | None,
        typer.Option(help="The system message.", rich_help_panel=options.PROMPTS),
    ] = None,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    max_tokens: Annotated[
        int,
        typer.Option(help="Tokens of an answer at most.", rich_help_panel=options.STOPPING),
    ] = DEFAULT_MAX_TOKENS,
    stop: options.Stop = None,
    kv_cache_memory: options.KVCacheMemory = options.DEFAULT_KV_CACHE_MEMORY,
    num_threads: options.NumThreads = None,
    speculative: speculative_options.ServeOption = None,
) -> None:
    """Talk with an engine; each line is a message, /help lists the commands.

    Without a terminal, answers alone go to stdout.
    """
    from octavo.runtime import LLM, SamplingParams
    from octavo.runtime.sampling.sampling_params import RequestOutputKind

    given: dict[str, Any] = options.given(
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    params = SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        output_kind=RequestOutputKind.DELTA,
        **given,
    )
    with LLM(
        engine,
        kv_cache_memory=kv_cache_memory,
        num_threads=num_threads,
        speculative=speculative_options.drafters_to_use(speculative),
    ) as llm:
        # Before anything is typed: an engine that cannot chat says so.
        llm.chat_prompt([{"role": "user", "content": "Hello"}])
        Chat(llm, params, ChatTerminal(), system=system or None).run()


class Chat:
    """One conversation with one engine. `params` are to be of the output kind DELTA."""

    def __init__(
        self, llm: LLM, params: SamplingParams, terminal: ChatTerminal, *, system: str | None = None
    ) -> None:
        limits = llm.engine.limits
        # The cache may be smaller than one request of the engine's full length.
        context_len = min(limits.max_model_len, limits.num_kv_blocks * limits.block_size)
        reserve = context_len if params.max_tokens is None else params.max_tokens
        self.conversation = Conversation(
            llm, context_len=context_len, reserve=reserve, system=system
        )
        self._llm = llm
        self._params = params
        self._terminal = terminal
        self._context_len = context_len
        self._unanswered: str | None = None  # refused, or interrupted before its first word
        self._num_retries = 0
        self._saved: set[Path] = set()
        self._ended = False
        self._commands = {
            "/help": self._help,
            "/clear": self._clear,
            "/system": self._system,
            "/retry": self._retry,
            "/save": self._save,
            "/stats": self._stats,
            "/quit": self._quit,
        }

    def run(self) -> None:
        """Until the input ends or /quit. Without a terminal the first error ends it as well."""
        if self._terminal.interactive:
            self._terminal.note(
                f"{self._context_len} tokens of context; /help lists the commands, Ctrl-D ends"
            )
        while not self._ended:
            try:
                message = self._terminal.read()
                if message is None:
                    return
                self._take(message.strip())
            except OctavoError as error:
                if not self._terminal.interactive:
                    raise
                self._terminal.error(error)

    def _take(self, message: str) -> None:
        if message.startswith("//"):
            self._ask(message[1:])
        elif message.startswith("/"):
            name, argument = (*message.split(maxsplit=1), "")[:2]
            command = self._commands.get(name)
            if command is None:
                raise RequestError(
                    f"there is no command {name}: /help lists them, a message that begins with / "
                    "is written with two"
                )
            command(argument)
        elif message:
            self._ask(message)

    def _ask(self, question: str) -> None:
        self._num_retries = 0
        self._answer(question)

    def _answer(self, question: str) -> None:
        self._unanswered = question
        turn = self.conversation.prepare(question)
        if turn.num_dropped:
            self._terminal.note(chat_notes.dropped(turn.num_dropped, self._context_len))
        self.conversation.exchanges = turn.kept
        params = self._params
        room = self._context_len - turn.num_prompt_tokens
        if params.max_tokens is None or params.max_tokens > room:
            params = replace(params, max_tokens=room)
        if params.seed is not None:
            # The same seed would give the same answer.
            params = replace(params, seed=(params.seed + self._num_retries) % _SEED_LIMIT)
        text, last = self._stream(turn.prompt, params)
        if text or (last is not None and last.finished):
            self.conversation.exchanges += (Exchange(question, text),)
            self._unanswered = None
        if last is None or not last.finished:
            self._terminal.note("interrupted" if text else "interrupted, nothing was said yet")
        elif last.outputs and last.outputs[0].finish_reason == "length":
            at_context = params.max_tokens == room
            self._terminal.note(
                chat_notes.cut(self._context_len, None if at_context else params.max_tokens)
            )
        if last is not None:
            self._terminal.note(chat_notes.summary(last))

    def _stream(self, prompt: Prompt, params: SamplingParams) -> tuple[str, RequestOutput | None]:
        """Shows an answer as it comes; returns its text and the last output, if there was any."""
        pieces: list[str] = []
        last = None
        outputs = self._llm.stream(prompt, params)
        with self._terminal.interruptible() as interrupted:
            try:
                for last in outputs:
                    for completion in last.outputs:
                        pieces.append(completion.text)
                        self._terminal.say(completion.text)
                    if interrupted():
                        break
            finally:
                outputs.close()  # aborts what has not ended
                self._terminal.end_line()
        return "".join(pieces), last

    def _help(self, _argument: str) -> None:
        self._terminal.note(HELP)

    def _clear(self, _argument: str) -> None:
        self.conversation.exchanges = ()
        self._unanswered = None
        self._terminal.note("the conversation is forgotten")

    def _system(self, text: str) -> None:
        self.conversation.system = text or None
        self._terminal.note("the system message is set" if text else "there is no system message")

    def _retry(self, _argument: str) -> None:
        question = self._unanswered
        if question is None:
            if not self.conversation.exchanges:
                raise RequestError("there is nothing to answer anew: send a message first")
            question = self.conversation.exchanges[-1].question
            self.conversation.exchanges = self.conversation.exchanges[:-1]
        self._num_retries += 1
        self._answer(question)

    def _save(self, name: str) -> None:
        if not name:
            raise RequestError("/save needs the name of a file: /save FILE")
        path = Path(name).expanduser()
        messages = self.conversation.messages()
        text = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
        try:
            # Only what this chat has written itself may be written over.
            with path.open("w" if path.resolve() in self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise RequestError(f"{path} exists: give the name of a new file") from None
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from None
        self._saved.add(path.resolve())
        self._terminal.note(f"{len(messages)} messages are in {path}")

    def _stats(self, _argument: str) -> None:
        print_tables(chat_notes.statistics(self._llm.metrics()), stderr=True)

    def _quit(self, _argument: str) -> None:
        self._ended = True
