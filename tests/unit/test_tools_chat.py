"""`octavo chat`, on null engines that talk in words: every prompt and answer is arithmetic."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.backends.manifest import Limits
from octavo.runtime import LLM, SamplingParams
from octavo.runtime.sampling.sampling_params import RequestOutputKind
from octavo.tools.chat import Chat
from octavo.tools.chat_terminal import ChatTerminal
from octavo.tools.main import app
from tests.unit.word_bundles import continuation, words, write_word_engine

SYSTEM, USER, ASSISTANT = 90, 91, 92
TEMPLATE = (
    "{% for m in messages %}w{{ {'system': 90, 'user': 91, 'assistant': 92}[m.role] }} "
    "{{ m.content }} {% endfor %}{% if add_generation_prompt %}w92{% endif %}"
)
LIMITS = Limits(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=32, block_size=4)
GREEDY = ("--temperature", "0", "--max-tokens", "8")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engines") / "chat"
    return write_word_engine(path, chat_template=TEMPLATE, limits=LIMITS)


@pytest.fixture
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine) as loaded:
        yield loaded


def talk(engine: Path, text: str | bytes, *options: str) -> Any:
    return CliRunner().invoke(app, ["chat", str(engine), *GREEDY, *options], input=text)


class Expected:
    """The conversation as it should go, in token ids."""

    def __init__(self, system: list[int] | None = None) -> None:
        self.prompt = [] if system is None else [SYSTEM, *system]

    def answer(self, question: list[int], count: int = 8) -> str:
        self.prompt += [USER, *question, ASSISTANT]
        answer = continuation(self.prompt, count)
        self.prompt += answer
        return words(answer)


def test_a_second_turn_follows_the_first_and_finds_it_cached(engine: Path) -> None:
    result = talk(engine, "w5 w6\n\nw7\n")
    expected = Expected()
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [expected.answer([5, 6]), expected.answer([7])]
    # 4 tokens of prompt and 8 of answer, of which the last was not computed: 2 blocks of 4.
    cut = "cut after 8 tokens: --max-tokens allows more"
    first, second = [line for line in result.stderr.splitlines() if line != cut]
    times = r", first token \d+ ms, \d+ tokens/s"
    assert re.fullmatch(r"4 prompt tokens, 0 cached \(0 %\)" + times, first)
    assert re.fullmatch(r"15 prompt tokens, 8 cached \(53 %\)" + times, second)


def test_a_line_that_ends_in_a_backslash_goes_on(engine: Path) -> None:
    result = talk(engine, "w5\\\nw6 \\\nw7\nw8\\")
    expected = Expected()
    assert result.stdout.splitlines() == [expected.answer([5, 6, 7]), expected.answer([8])]


def test_system_messages_are_set_and_taken_away(engine: Path) -> None:
    result = talk(
        engine, "w5\n/system\\\nw3\n/clear\nw5\n/system\n/clear\nw5\n", "--system", "w2 w1"
    )
    assert result.stdout.splitlines() == [
        Expected([2, 1]).answer([5]),
        Expected([3]).answer([5]),
        Expected().answer([5]),
    ]
    assert "the system message is set\nthe conversation is forgotten\n" in result.stderr
    assert "there is no system message\n" in result.stderr


def test_retry_asks_again_in_the_place_of_the_last_answer(engine: Path) -> None:
    expected = Expected()
    answers = [expected.answer([5]), expected.answer([6])]
    result = talk(engine, "w5\nw6\n/retry\n/retry\nw7\n")
    answers += [answers[-1], answers[-1], expected.answer([7])]
    assert result.stdout.splitlines() == answers


def test_retry_takes_the_next_seed(engine: Path) -> None:
    sampled = ("--temperature", "5", "--seed", "7")
    first, second, third = talk(engine, "w5\n/retry\n/retry\n", *sampled).stdout.splitlines()
    assert len({first, second, third}) == 3
    assert talk(engine, "w5\n/retry\n/retry\n", *sampled).stdout.splitlines()[2] == third
    other = talk(engine, "w5\n", "--temperature", "5", "--seed", "8").stdout
    assert other == second + "\n"


def test_quit_ends_the_chat_and_help_lists_every_command(engine: Path) -> None:
    result = talk(engine, "/help\n/quit\nw5\n")
    assert (result.exit_code, result.stdout) == (0, "")
    for command in ("/clear", "/system TEXT", "/retry", "/save FILE", "/stats", "/quit"):
        assert f"\n{command} " in result.stderr
    assert "backslash" in result.stderr


def test_save_writes_what_was_said_and_nothing_over_other_files(
    engine: Path, tmp_path: Path
) -> None:
    file, other = tmp_path / "talk.json", tmp_path / "other"
    other.write_text("precious")
    result = talk(engine, f"w5\n/save {file}\nw6\n/save {file}\n", "--system", "w2")
    expected = Expected([2])
    assert result.exit_code == 0
    assert json.loads(file.read_text()) == [
        {"role": "system", "content": "w2"},
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": expected.answer([5])},
        {"role": "user", "content": "w6"},
        {"role": "assistant", "content": expected.answer([6])},
    ]
    for name, message in (
        (other, f"{other} exists: give the name of a new file"),
        (tmp_path / "no" / "file", "cannot be written: No such file or directory"),
        ("", "/save needs the name of a file"),
    ):
        result = talk(engine, f"/save {name}\n")
        assert result.exit_code == 1
        assert message in result.stderr
    assert other.read_text() == "precious"


def test_stats_sum_up_the_engine(engine: Path) -> None:
    result = talk(engine, "w5 w6\nw7\n/stats\n")
    rows = dict(re.findall(r"^ *(\S.*?) {2,}(\S.*?) *$", result.stderr, re.MULTILINE))
    assert rows["answers"] == "2"
    assert rows["of them interrupted"] == "0"
    assert rows["prompt tokens"] == "19"  # 4 and 15
    assert rows["of them cached"] == "8 (42 %)"
    assert rows["generated tokens"] == "16"
    assert re.fullmatch(r"\d+\.\d ms", rows["first token, median"])


def test_a_slash_is_written_with_two(engine: Path) -> None:
    expected = Expected().answer([0])  # "/w5" is no word of the engine: it reads w0
    assert talk(engine, "//w5\n").stdout == expected + "\n"


def test_the_oldest_exchanges_make_room_and_the_system_message_stays(engine: Path) -> None:
    """An exchange has 11 tokens: the sixth prompt has 60, four too many to leave room for 8.

    Half of 64 is to be free: of the five exchanges before it two remain.
    """
    result = talk(engine, "".join(f"w{i}\n" for i in range(10, 16)), "--system", "w8")
    expected = Expected([8])
    answers = [expected.answer([question]) for question in range(10, 15)]
    del expected.prompt[2 : 2 + 3 * 11]
    answers.append(expected.answer([15]))
    assert result.stdout.splitlines() == answers
    note = "the oldest 3 exchanges were dropped: the conversation no longer fits 64 tokens"
    assert result.stderr.count("dropped") == 1
    assert note in result.stderr
    assert "27 prompt tokens" in result.stderr


def test_an_answer_ends_where_the_context_is_full(engine: Path) -> None:
    """Also where the paged cache holds less than the engine's length: 10 blocks of 64 bytes."""
    for options, length in (((), 64), (("--kv-cache-memory", "640"), 40)):
        result = talk(engine, "w5\n", "--max-tokens", "500", *options)
        assert result.stdout == Expected().answer([5], length - 3) + "\n"
        assert f"cut: prompt and answer fill the {length} tokens of context" in result.stderr


def test_a_stop_text_ends_an_answer(engine: Path) -> None:
    answer = Expected().answer([5]).split()
    result = talk(engine, "w5\n", "--stop", answer[4])
    assert result.stdout.split() == answer[:4]
    assert "cut" not in result.stderr


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("w5\n", ("--temperature", "nan"), "temperature is nan"),
        ("w5\n", ("--top-k", "-2"), "top_k is -2"),
        ("w5\n", ("--min-p", "2"), "min_p is 2"),
        ("w5\n", ("--repetition-penalty", "0"), "repetition_penalty is 0"),
        ("w5\n", ("--top-p", "0"), "top_p is 0"),
        ("/fly\nw5\n", (), "there is no command /fly: /help lists them"),
        ("/retry\n", (), "nothing to answer anew"),
        (b"\xff\xfe\n", (), "the input is not UTF-8 text"),
        ("w5 " * 62 + "\n", (), "a prompt of 64 tokens, a prompt and its answer may have 64"),
    ],
)
def test_without_a_terminal_the_first_refusal_ends_the_chat(
    engine: Path, text: str | bytes, options: tuple[str, ...], message: str
) -> None:
    result = talk(engine, text, *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_engine_that_cannot_chat_says_so(null_engine: Path, tmp_path: Path) -> None:
    without_template = write_word_engine(tmp_path / "engine")
    for path, message in (
        (null_engine, "the engine has no tokenizer"),
        (without_template, "the engine has no chat template"),
    ):
        result = talk(path, "w5\n")
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"error: {message}")
        assert result.stderr.count("\n") == 1


class ScriptedTerminal(ChatTerminal):
    """A terminal where Ctrl-C is pressed when a given piece of the answers is shown."""

    def __init__(self, *messages: str, interrupt_at: int | None = None) -> None:
        self.interactive = True
        self.shown: list[str] = []
        self.notes: list[str] = []
        self._messages = list(messages)
        self._interrupt_at = interrupt_at

    def read(self) -> str | None:
        return self._messages.pop(0) if self._messages else None

    def say(self, text: str) -> None:
        self.shown.append(text)
        if len(self.shown) == self._interrupt_at:
            signal.raise_signal(signal.SIGINT)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def error(self, error: Exception) -> None:
        self.notes.append(f"error: {error}")


def chat_with(llm: LLM, terminal: ChatTerminal, **options: Any) -> Chat:
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": 8, "output_kind": RequestOutputKind.DELTA, **options}
    )
    chat = Chat(llm, params, terminal)
    chat.run()
    return chat


def test_an_interrupted_answer_is_kept_as_far_as_it_came(llm: LLM) -> None:
    terminal = ScriptedTerminal("w5", "w6", interrupt_at=3)
    handler = signal.getsignal(signal.SIGINT)
    chat = chat_with(llm, terminal)
    expected = Expected()
    first, second = expected.answer([5], 3), expected.answer([6])
    assert "".join(terminal.shown) == f"{first}\n{second}\n"
    assert [exchange.answer for exchange in chat.conversation.exchanges] == [first, second]
    assert terminal.notes.count("interrupted") == 1
    assert signal.getsignal(signal.SIGINT) is handler
    assert llm.metrics()["request_success"]["abort"] == 1
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.pool.num_available == llm.engine.pool.num_blocks


def test_a_message_without_an_answer_is_left_to_retry(llm: LLM) -> None:
    """A stop text that the first word may begin holds it back: nothing is said at the interrupt."""
    answer = Expected().answer([5])
    terminal = ScriptedTerminal("w5", "/retry", interrupt_at=1)
    chat = chat_with(llm, terminal, stop=f"{answer.split()[0]} never")
    assert "".join(terminal.shown) == f"\n{answer}\n"
    assert "interrupted, nothing was said yet" in terminal.notes
    (exchange,) = chat.conversation.exchanges
    assert (exchange.question, exchange.answer) == ("w5", answer)


def test_on_a_terminal_the_chat_goes_on_after_a_refusal(llm: LLM) -> None:
    terminal = ScriptedTerminal("w5", "w6 " * 70, "/fly", "w7")
    chat = chat_with(llm, terminal)
    expected = Expected()
    answers = [expected.answer([5]), expected.answer([7])]
    assert [exchange.answer for exchange in chat.conversation.exchanges] == answers
    errors = [note for note in terminal.notes if note.startswith("error: ")]
    assert len(errors) == 2
    assert "shorten it" in errors[0]
    assert "/help lists them" in errors[1]


def test_a_second_interrupt_ends_the_program() -> None:
    with ScriptedTerminal().interruptible() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_interrupt_while_typing_begins_the_message_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed: Iterator[str | BaseException] = iter(["w5 \\", KeyboardInterrupt(), "w6"])
    prompts = []

    def type_next(prompt: str) -> str:
        prompts.append(prompt)
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", type_next)
    terminal = ChatTerminal()
    terminal.interactive = True
    assert terminal.read() == "w6"
    assert prompts == ["> ", ". ", "> "]
    assert "Ctrl-D or /quit ends the chat" in capsys.readouterr().err


def test_a_terminal_has_prompts_history_and_an_end(engine: Path) -> None:
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "octavo.tools.main", "chat", str(engine), *GREEDY]
    environment = {**os.environ, "TERM": "dumb"}
    with subprocess.Popen(
        command, stdin=its_end, stdout=its_end, stderr=its_end, env=environment
    ) as process:
        os.close(its_end)
        try:
            seen = read_until(terminal, "> ")
            assert "64 tokens of context; /help lists the commands, Ctrl-D ends" in seen
            os.write(terminal, b"w5\\\n")
            read_until(terminal, ". ")
            os.write(terminal, b"w6\n")
            seen = read_until(terminal, "> ")
            expected = Expected()
            assert expected.answer([5, 6]) in seen
            assert "4 prompt tokens" in seen
            os.write(terminal, b"\x10\n")  # Ctrl-P: the line before, w6
            assert expected.answer([6]) in read_until(terminal, "> ")
            os.write(terminal, b"\x04")
            assert process.wait(timeout=60) == 0
        finally:
            os.close(terminal)  # ends a chat that still waits for input


def read_until(terminal: int, end: str) -> str:
    """What a terminal shows up to a text that nothing follows."""
    seen, deadline = "", time.monotonic() + 60
    while not seen.endswith(end):
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 4096).decode()
    return seen
