// The conversation. Whatever a model writes is put in as text: it never becomes part of the page.

import { events, request } from "./api.js";

const FRAME = 40; // milliseconds
const byId = (id) => document.getElementById(id);

export class Chat {
  constructor({ onUnauthorized }) {
    this.onUnauthorized = onUnauthorized;
    this.model = null;
    this.isChat = true;
    this.messages = [];
    this.running = null;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.ask();
    });
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("retry").addEventListener("click", () => this.retry());
    byId("clear").addEventListener("click", () => this.clear());
  }

  // An engine without a chat template continues texts instead.
  serve(model, isChat) {
    this.model = model;
    this.isChat = isChat;
    byId("system-field").hidden = !isChat;
    byId("hint").textContent = isChat ? "" : "This engine has no chat template: it continues your text.";
  }

  ask() {
    const text = byId("question").value;
    if (!text.trim() || this.running) return;
    byId("question").value = "";
    if (!this.isChat) this.messages = [];
    this.messages.push({ role: "user", content: text });
    this.show("user", text);
    this.answer();
  }

  retry() {
    if (this.running || !this.messages.length) return;
    const last = byId("messages").lastElementChild;
    if (last?.className === "assistant") last.remove();
    if (this.messages.at(-1).role === "assistant") this.messages.pop();
    this.answer();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    byId("messages").replaceChildren();
    this.enable();
    byId("question").focus();
  }

  async answer() {
    const shown = this.show("assistant", "");
    const messages = this.messages;
    const running = (this.running = new AbortController());
    this.enable();
    const turn = { text: "", begun: performance.now(), first: null, last: null, usage: null, reason: null };
    try {
      const path = this.isChat ? "v1/chat/completions" : "v1/completions";
      const response = await request(path, { body: this.body(), signal: running.signal });
      for await (const event of events(response)) this.take(event, turn, shown);
    } catch (error) {
      if (error.name !== "AbortError") shown.error(error.message);
      if (error.status === 401) this.onUnauthorized();
    }
    if (turn.text) messages.push({ role: "assistant", content: turn.text });
    shown.stats(statistics(turn, running.signal.aborted));
    if (this.running === running) this.running = null;
    this.enable();
  }

  body() {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    const body = {
      model: this.model,
      stream: true,
      stream_options: { include_usage: true },
      temperature: number("temperature"),
      top_p: number("top_p"),
      max_tokens: number("max_tokens"),
      seed: number("seed"),
    };
    if (!this.isChat) return { ...body, prompt: this.messages.at(-1).content };
    const system = byId("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    return { ...body, messages: [...first, ...this.messages] };
  }

  take(event, turn, shown) {
    turn.usage = event.usage ?? turn.usage;
    const [choice] = event.choices;
    if (!choice) return;
    const text = choice.text ?? choice.delta.content ?? "";
    turn.reason = choice.finish_reason ?? turn.reason;
    if (!text) return;
    turn.last = performance.now();
    turn.first ??= turn.last;
    turn.text += text;
    shown.add(text);
  }

  show(role, content) {
    const item = document.createElement("li");
    item.className = role;
    const text = document.createElement("p");
    text.className = "text";
    const node = document.createTextNode(content);
    text.append(node);
    item.append(text);
    byId("messages").append(item);
    item.scrollIntoView({ block: "end" });
    // Tokens may come faster than pictures: what came in between is laid out once.
    let waiting = "";
    const flush = () => {
      if (waiting) node.appendData(waiting);
      waiting = "";
      item.scrollIntoView({ block: "end" });
    };
    const line = (className, value) => {
      if (value) {
        const shown = document.createElement("p");
        shown.className = className;
        shown.textContent = value;
        item.append(shown);
      }
      flush();
    };
    return {
      add: (piece) => {
        if (!waiting) setTimeout(flush, FRAME);
        waiting += piece;
      },
      error: (value) => line("error", value),
      stats: (value) => line("stats", value),
    };
  }

  enable() {
    byId("send").hidden = this.running !== null;
    byId("stop").hidden = this.running === null;
    byId("retry").disabled = this.running !== null || !this.messages.length;
    byId("clear").disabled = !byId("messages").childElementCount;
  }
}

function statistics(turn, stopped) {
  const parts = [];
  if (turn.usage) {
    const { prompt_tokens: prompt, completion_tokens: completion } = turn.usage;
    const cached = turn.usage.prompt_tokens_details.cached_tokens;
    parts.push(`${prompt} prompt tokens, ${cached} cached`, `${completion} tokens`);
  }
  if (turn.first !== null) {
    parts.push(`first after ${Math.round(turn.first - turn.begun)} ms`);
    const seconds = (turn.last - turn.first) / 1000;
    if (turn.usage && seconds > 0) {
      parts.push(`${((turn.usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
  }
  if (turn.reason === "length") parts.push("cut off: the limit of tokens is reached");
  if (stopped) parts.push("stopped");
  return parts.join(" · ");
}
