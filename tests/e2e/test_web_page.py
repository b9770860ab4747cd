"""The page of a server in a real browser, used as a person uses it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from tokenizers import decoders, models, pre_tokenizers

from octavo.backends import null
from octavo.backends.manifest import Limits
from tests.e2e.required import skip_or_fail
from tests.server_process import ServerProcess, serving
from tests.unit.word_bundles import VOCAB_SIZE, continuation, words, write_word_engine

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
LIMITS = Limits(max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=64, block_size=16)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1200,800",
)  # fmt: skip
MARKUP = "<img src=x onerror=document.title='broken'>"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines") / "words"
    return write_word_engine(folder, chat_template=TEMPLATE, limits=LIMITS)


class Browser:
    """What a person sees and does."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, server: ServerProcess) -> None:
        self.driver.get(server.url)

    def text(self, selector: str) -> list[str]:
        """Of every visible element."""
        found = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return [element.text for element in found if element.is_displayed()]

    def type(self, selector: str, text: str) -> None:
        element = self.driver.find_element(By.CSS_SELECTOR, selector)
        element.clear()
        element.send_keys(text)

    def click(self, selector: str) -> None:
        self.driver.find_element(By.CSS_SELECTOR, selector).click()

    def until(self, condition: Callable[[], object]) -> Any:
        return WebDriverWait(self.driver, 30, 0.05).until(lambda _: condition())

    def settings(self, **values: object) -> None:
        if not self.text("#temperature"):
            self.click("summary")
        for name, value in values.items():
            self.type(f"#{name}", str(value))

    def complaints(self) -> list[str]:
        """Of the browser itself; what the server answered to the page is none."""
        entries: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [
            entry["message"]
            for entry in entries
            if entry["level"] == "SEVERE" and "Failed to load resource" not in entry["message"]
        ]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        skip_or_fail("Chromium and its driver are not installed")
    options = Options()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(chromedriver))
    driver.set_script_timeout(30)
    driver.set_page_load_timeout(30)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(driver: webdriver.Chrome) -> Iterator[Browser]:
    browser = Browser(driver)
    yield browser
    assert browser.complaints() == []


@contextmanager
def page(browser: Browser, engine: Path, *options: str, **others: Any) -> Iterator[ServerProcess]:
    with serving(engine, *options, **others) as server:
        browser.open(server)
        browser.until(lambda: browser.text("#state") == ["ready"])
        yield server


def test_a_message_is_answered_word_by_word(browser: Browser, engine: Path) -> None:
    with page(browser, engine):
        browser.until(lambda: browser.text("#model") == ["words"])
        assert browser.driver.title == "words · Octavo"
        browser.settings(temperature=0, max_tokens=6)
        browser.type("#question", "w3 w4" + Keys.ENTER)
        browser.until(lambda: browser.text(".assistant .stats"))
        answer = words(continuation([3, 4], 6))
        assert browser.text(".text") == ["w3 w4", answer]
        (told,) = browser.text(".stats")
        assert told.startswith("2 prompt tokens, 0 cached · 6 tokens · first after ")
        assert told.endswith("cut off: the limit of tokens is reached")
        # The conversation goes on, with all that was said before.
        browser.type("#question", "w5")
        browser.click("#send")
        browser.until(lambda: len(browser.text(".assistant .stats")) == 2)
        said = [3, 4, *continuation([3, 4], 6), 5]
        assert browser.text(".text")[2:] == ["w5", words(continuation(said, 6))]
        browser.click("#retry")
        browser.until(lambda: len(browser.text(".assistant .stats")) == 2)
        assert browser.text(".text")[3] == words(continuation(said, 6))
        browser.click("#clear")
        assert browser.text(".text") == []
        browser.settings(system="w9")
        browser.type("#question", "w3" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "w4" + Keys.ENTER)
        browser.until(lambda: browser.text(".assistant .stats"))
        assert browser.text(".text") == ["w3\nw4", words(continuation([9, 3, 4], 6))]


def test_an_answer_can_be_stopped(browser: Browser, tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"max_model_len": 20_000})
    engine = write_word_engine(tmp_path / "words", chat_template=TEMPLATE, limits=limits)
    with page(browser, engine) as server:
        browser.settings(temperature=0, max_tokens=19_000)
        browser.type("#question", "w3" + Keys.ENTER)
        browser.until(lambda: any(browser.text(".assistant .text")))
        browser.click("#stop")
        browser.until(lambda: browser.text(".assistant .stats"))
        assert browser.text(".assistant .stats")[0].endswith("stopped")
        (text,) = browser.text(".assistant .text")
        num_words = len(text.split())
        assert text == words(continuation([3], num_words))
        assert num_words < 19_000
        running = 'octavo:num_requests_running{model_name="words"} 0.0'
        browser.until(lambda: running in server.get("/metrics")[1])


def test_a_refusal_is_read_as_the_server_says_it(browser: Browser, engine: Path) -> None:
    with page(browser, engine):
        browser.settings(temperature=0, max_tokens=3)
        script = "document.getElementById('question').value = 'w1 '.repeat(5000)"
        browser.driver.execute_script(script)
        browser.click("#send")
        browser.until(lambda: browser.text(".error"))
        (told,) = browser.text(".error")
        assert told.startswith("the prompt has 5000 tokens, the engine takes at most 4095")


def test_a_key_is_asked_for(browser: Browser, engine: Path) -> None:
    with serving(engine, environment={"OCTAVO_API_KEYS": "secret"}) as server:
        browser.open(server)
        browser.until(lambda: browser.text("#key-form"))
        browser.type("#key", "wrong" + Keys.ENTER)
        browser.until(lambda: browser.text("#key-form"))
        browser.type("#key", "secret" + Keys.ENTER)
        browser.until(lambda: browser.text("#model") == ["words"])
        assert browser.text("#key-form") == []
        browser.settings(temperature=0, max_tokens=3)
        browser.type("#question", "w3" + Keys.ENTER)
        browser.until(lambda: browser.text(".assistant .stats"))
        assert browser.text(".assistant .text") == [words(continuation([3], 3))]
        browser.driver.execute_script("sessionStorage.clear()")


def test_what_a_model_writes_is_text(browser: Browser, tmp_path: Path) -> None:
    """Every word of this model is markup that would change the title."""
    vocabulary = {f"{MARKUP}{number}": number for number in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, f"{MARKUP}0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece("##")
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "chat_template.jinja": TEMPLATE.encode(),
    }
    engine = null.write_engine(
        tmp_path / "markup", vocab_size=VOCAB_SIZE, limits=LIMITS, extra_files=files
    )
    with page(browser, engine):
        browser.settings(temperature=0, max_tokens=2)
        browser.type("#question", MARKUP + Keys.ENTER)
        browser.until(lambda: browser.text(".assistant .stats"))
        assert browser.text(".user .text") == [MARKUP]
        assert browser.text(".assistant .text")[0].count(MARKUP) == 2
        assert browser.driver.find_elements(By.CSS_SELECTOR, "#messages img") == []
        assert browser.driver.title == "markup · Octavo"


def test_metrics_and_facts_are_shown(browser: Browser, engine: Path) -> None:
    with page(browser, engine) as server:
        browser.until(lambda: browser.text("#facts dt"))
        facts = dict(zip(browser.text("#facts dt"), browser.text("#facts dd"), strict=True))
        assert facts["Context"] == "4,096 tokens"
        assert facts["Backend"] == "null, cpu"
        browser.settings(temperature=0, max_tokens=3000)
        browser.type("#question", "w3" + Keys.ENTER)

        def figure(name: str) -> str:
            names, values = browser.text("#metrics dt"), browser.text("#metrics dd")
            return dict(zip(names, values, strict=True))[name]

        browser.until(lambda: figure("Generated").removesuffix(" tok/s").isdigit())
        browser.until(lambda: figure("Generated") != "0 tok/s")
        browser.until(lambda: browser.text(".assistant .stats"))
        browser.until(lambda: figure("Running") == "0")
        assert figure("First token").endswith(" ms")
        # Nothing that the page loads comes from elsewhere.
        script = "return performance.getEntriesByType('resource').map(entry => entry.name)"
        loaded: list[str] = browser.driver.execute_script(script)
        assert loaded
        assert all(name.startswith((server.url, "data:")) for name in loaded)


def test_a_dead_engine_is_shown_until_another_one_lives(browser: Browser, engine: Path) -> None:
    with page(browser, engine) as server:
        # The first one is replaced at once, later ones after a while: long enough to be seen.
        for _ in range(4):
            server.kill_engine()
        browser.until(lambda: "was killed by signal 9" in browser.text("#state")[0])
        browser.until(lambda: browser.text("#state") == ["ready"])
        browser.settings(temperature=0, max_tokens=3)
        browser.type("#question", "w3" + Keys.ENTER)
        browser.until(lambda: browser.text(".assistant .stats"))
        assert browser.text(".assistant .text") == [words(continuation([3], 3))]


def test_without_a_chat_template_texts_are_continued(browser: Browser, tmp_path: Path) -> None:
    engine = write_word_engine(tmp_path / "plain", limits=LIMITS)
    with page(browser, engine):
        browser.until(lambda: browser.text("#hint") != [""])
        browser.settings(temperature=0, max_tokens=3)
        browser.type("#question", "w7" + Keys.ENTER)
        browser.until(lambda: browser.text(".assistant .stats"))
        assert browser.text(".assistant .text") == [words(continuation([7], 3))]
