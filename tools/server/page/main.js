// The page of a server: a chat, what the engine is doing, and what it is.

import { request, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { Metrics } from "./metrics.js";

const INTERVAL = 1000; // milliseconds between two looks at the server
const byId = (id) => document.getElementById(id);

const chat = new Chat({ onUnauthorized: askForKey });
const metrics = new Metrics(byId("metrics"));
let knowsEngine = false;

function askForKey() {
  byId("key-form").hidden = false;
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  knowsEngine = false;
  look();
});

async function showState() {
  try {
    await request("ready");
    setState("ready", "ready");
    return true;
  } catch (error) {
    const loading = error.message.includes("still loading");
    setState(loading ? "loading" : "trouble", error.message);
    return false;
  }
}

// Said only when it changes: screen readers read it out.
function setState(state, text) {
  if (byId("state").textContent === text) return;
  byId("state").textContent = text;
  byId("state").dataset.state = state;
}

async function showEngine() {
  const info = await (await request("info")).json();
  knowsEngine = true;
  document.title = `${info.model} · Octavo`;
  byId("model").textContent = info.model;
  chat.serve(info.model, info.chat);
  const facts = [
    ["Architecture", info.architecture],
    ["Parameters", `${(info.num_parameters / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} million`],
    ["Vocabulary", info.vocab_size.toLocaleString("en")],
    ["Backend", `${info.backend}, ${info.device}`],
    ["Weights", info.quantization === "none" ? info.dtype : info.quantization],
    ["Cache", `${info.kv_cache_dtype}, blocks of ${info.block_size}`],
    ["Context", `${info.max_model_len.toLocaleString("en")} tokens`],
    ["A step", `${info.max_num_seqs} sequences, ${info.max_num_batched_tokens.toLocaleString("en")} tokens`],
    ["Drafters", info.drafters.join(", ") || "none"],
    ["Tool calls", info.tools ? "yes" : "no"],
    ["Octavo", info.octavo],
    ...Object.entries(info.built_with).map(([name, version]) => [`Built with ${name}`, version]),
  ];
  byId("facts").replaceChildren(
    ...facts.flatMap(([name, value]) => {
      const title = document.createElement("dt");
      title.textContent = name;
      const shown = document.createElement("dd");
      shown.textContent = value;
      return [title, shown];
    }),
  );
}

async function look() {
  if (document.visibilityState !== "visible") return;
  try {
    if ((await showState()) && !knowsEngine) await showEngine();
    metrics.take(await (await request("metrics")).text(), performance.now());
  } catch (error) {
    if (error.status === 401 && byId("key-form").hidden) askForKey();
  }
}

async function watch() {
  for (;;) {
    await look();
    await new Promise((resolve) => setTimeout(resolve, INTERVAL));
  }
}

watch();
