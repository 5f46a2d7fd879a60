// The page: what is asked, who answers, and what happens when nobody does.

import { alive, answer, LostError, readiness, RefusedError, version } from "./client.js";
import { compare } from "./comparison.js";
import { el } from "./dom.js";
import { Panel } from "./panel.js";
import { Run } from "./run.js";
import { count, number, policyName } from "./words.js";

const RETRY_SECONDS = [0.5, 1, 2, 3]; // then the last one again and again
const LOOK_SECONDS = 5; // between looks at a server that is well
const at = (id) => document.getElementById(id);
const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

const page = { state: "checking", key: "", steps: false, panels: [], abort: null };

// The server.

const SERVER = {
  checking: "Looking for the server",
  loading: "Not ready yet",
  ready: "Ready",
  locked: "Needs a key",
  lost: "Lost: trying again",
};

function setState(state, problem = "") {
  const back = state === "ready" && (page.state === "lost" || page.state === "loading");
  page.state = state;
  at("server").textContent = SERVER[state];
  at("server").dataset.state = state;
  showProblem(problem);
  at("key-form").hidden = state !== "locked";
  at("go").disabled = state !== "ready" || page.abort !== null;
  if (back) say("The server is there again.");
}

function showProblem(sentence) {
  if (at("problem").textContent !== sentence) at("problem").textContent = sentence;
  at("problem").hidden = !sentence;
}

const say = (sentence) => (at("news").textContent = sentence);

/** Look until the server can generate, then learn what runs there. Only one of these at a time. */
let connecting = false;
async function connect() {
  if (connecting) return;
  connecting = true;
  try {
    for (let tries = 0; ; tries++) {
      try {
        const ready = await readiness();
        if (ready === "ok") {
          await learn();
          return;
        }
        setState("loading", ready);
      } catch (error) {
        if (!(error instanceof LostError)) throw error;
        setState("lost", "The server does not answer. This page goes on trying, and your prompt stays here.");
      }
      await pause(RETRY_SECONDS[Math.min(tries, RETRY_SECONDS.length - 1)]);
    }
  } finally {
    connecting = false;
  }
}

async function learn() {
  try {
    const told = await version(page.key);
    at("model").textContent = [told.model, told.info.moe_layers && `${told.info.moe_layers} MoE layers of ${told.info.experts} experts, top-${told.info.top_k}`, told.info.device]
      .filter(Boolean)
      .join(" \u00b7 ");
    offer(told.info);
    setState("ready");
  } catch (error) {
    if (!(error instanceof RefusedError)) throw error;
    if (error.status !== 401) setState("loading", error.message);
    else lock(page.key ? error.message : "");
  }
}

function lock(problem) {
  setState("locked", problem);
  at("key").focus();
}

/** The policies that this server knows, its own first. */
function offer(info) {
  const names = info.policies ?? [];
  page.steps = names.length > 0; // an engine that schedules by itself tells neither
  const was = [at("policy").value, at("against").value];
  const options = names.map((name, i) => el("option", { value: name, text: i ? policyName(name) : `${policyName(name)}, the server's own` }));
  at("policy").replaceChildren(...(options.length ? options : [el("option", { value: "", text: "the server's own" })]));
  at("against").replaceChildren(el("option", { value: "", text: "nothing" }), ...names.map((name) => el("option", { value: name, text: policyName(name) })));
  at("policy").disabled = at("against").disabled = !names.length;
  if (names.includes(was[0])) at("policy").value = was[0];
  if (names.includes(was[1])) at("against").value = was[1];
}

/** A server that went away unnoticed. */
async function look() {
  for (;;) {
    await pause(LOOK_SECONDS);
    if (page.state !== "ready" || page.abort || document.hidden) continue;
    try {
      if (!(await alive())) connect();
    } catch (error) {
      if (!(error instanceof LostError)) throw error;
      connect();
    }
  }
}

// Asking.

function bodyOf(policy, seed) {
  const chat = at("form").value === "chat";
  const text = at("prompt").value;
  return {
    ...(chat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
    max_tokens: at("tokens").valueAsNumber,
    temperature: at("temperature").valueAsNumber,
    seed,
    ...(page.steps ? { ecospec: { steps: true, ...(policy ? { policy } : {}) } } : {}),
  };
}

/** One run to its end. Its problem, if it had one, is thrown. */
async function perform(panel, body, path) {
  const { run } = panel;
  run.state = "running";
  panel.refresh();
  try {
    for await (const chunk of answer(path, body, page.key, page.abort.signal)) {
      run.add(chunk);
      panel.refresh();
    }
    run.state = "done";
  } catch (error) {
    run.state = error.name === "AbortError" ? "stopped" : "failed";
    run.problem = error.name === "AbortError" ? "stopped" : error instanceof LostError ? "the server was lost here" : "";
    if (run.state === "failed") throw error;
  } finally {
    panel.refresh();
  }
}

async function ask() {
  const wishes = [at("policy").value, at("against").value].filter((wish, i) => i === 0 || wish);
  const path = at("form").value === "chat" ? "/v1/chat/completions" : "/v1/completions";
  const seed = crypto.getRandomValues(new Uint32Array(1))[0]; // the same for both: their texts must be the same, too
  const bodies = wishes.map((wish) => bodyOf(wish, seed));
  page.panels.forEach((panel) => panel.close());
  page.panels = wishes.map((wish) => new Panel(new Run(wish, (wish && policyName(wish)) || "The server's own policy"), () => page.panels.map((panel) => panel.run)));
  at("runs").replaceChildren(...page.panels.map((panel) => panel.root));
  at("runs").dataset.runs = wishes.length;
  at("intro").hidden = true;
  at("comparison").hidden = true;
  page.abort = new AbortController();
  at("stop").hidden = false;
  setState(page.state);
  say("Answering.");
  try {
    for (const [i, panel] of page.panels.entries()) {
      if (page.abort.signal.aborted) break;
      await perform(panel, bodies[i], path);
    }
    finish();
  } catch (error) {
    fail(error);
  } finally {
    page.abort = null;
    at("stop").hidden = true;
    at("go").disabled = page.state !== "ready";
    compare(at("comparison"), page.panels.map((panel) => panel.run));
  }
}

function finish() {
  const told = page.panels.map(({ run }) => {
    const figures = run.figures();
    if (run.state === "stopped") return "Stopped.";
    return figures ? `${run.name}: ${count(figures.tokens, "token")}, ${number(figures.tokensPerSecond)} per second.` : "Done.";
  });
  say(told.join(" "));
}

function fail(error) {
  say("");
  if (error instanceof LostError) {
    setState("lost", `${error.message} This page goes on trying, and your prompt stays here.`);
    connect();
  } else if (error instanceof RefusedError && error.status === 401) {
    lock(error.message);
  } else if (error instanceof RefusedError) {
    showProblem(error.message);
    if (error.status === 503) connect();
  } else {
    showProblem(`This page failed: ${error.message}`);
    throw error;
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (page.state === "ready" && !page.abort) ask();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => {
  page.abort?.abort();
  at("go").focus();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  page.key = at("key").value.trim();
  at("key").value = "";
  connect();
});

offer({});
connect();
look();
