// The box that asks: a prompt goes out, the answer streams in, with its place in the batch.

import { choice } from "./choice.js";
import { count, say, timed, whole } from "./words.js";

const STAGES = ["waiting", "prefill", "decode"];
const ENDS = {
  length: "ended at its bound", stop: "ended by itself", abort: "aborted",
  timeout: "given up: it took too long", error: "failed: its step could not be carried out",
};
const HINT = "The answer comes here, token by token.";

/** The `data:` lines of a response, as they come. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trim();
  }
}

export class Ask {
  /** `watch(ids)` asks the feed for everything about these requests. */
  constructor(page, watch) {
    this.page = page;
    this.watch = watch;
    this.model = "";
    this.asked = null;
    page.answer.dataset.hint = HINT;
    page.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    page.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) page.form.requestSubmit();
    });
    page.stop.addEventListener("click", () => this.asked?.stop.abort());
  }

  async send() {
    if (this.asked) return;
    const id = `page-${Math.random().toString(16).slice(2, 10)}`;
    const asked = (this.asked = { stop: new AbortController(), began: performance.now(), at: {}, tokens: 0 });
    this.page.send.disabled = true;
    this.page.stop.disabled = false;
    this.page.answer.textContent = "";
    this.tell("sent");
    this.stage("waiting");
    const chat = this.page.form.elements.chat.checked;
    this.known(id);
    try {
      await this.read(await this.post(id, chat), asked);
      this.tell(`${ENDS[asked.reason] ?? "ended"}: ${count(asked.tokens, "token")} in ${timed(performance.now() - asked.began)}`);
    } catch (error) {
      if (asked.stop.signal.aborted) this.tell(`stopped after ${count(asked.tokens, "token")}`);
      else this.tell(error.message, true);
    }
    this.stage(null);
    this.asked = null;
    this.page.send.disabled = false;
    this.page.stop.disabled = true;
  }

  async post(id, chat) {
    const { prompt, max_tokens, priority, client, key } = this.page.form.elements;
    const headers = { "Content-Type": "application/json" };
    if (key.value) headers.Authorization = `Bearer ${key.value}`;
    const body = {
      model: this.model, max_tokens: Number(max_tokens.value), priority: Number(priority.value),
      user: client.value, request_id: id, stream: true,
      stream_options: { include_usage: true },
    };
    if (chat) body.messages = [{ role: "user", content: prompt.value }];
    else body.prompt = prompt.value;
    const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST", headers, body: JSON.stringify(body), signal: this.asked.stop.signal,
    });
    if (response.ok) return response;
    if (response.status === 401) {
      this.page.keyField.hidden = false;
      key.focus();
    }
    const told = await response.json().catch(() => null);
    throw new Error(told?.error?.message ?? `the server answered ${response.status}`);
  }

  async read(response, asked) {
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.id) this.known(chunk.id);
      asked.tokens = chunk.usage?.completion_tokens ?? asked.tokens;
      const [one] = chunk.choices ?? [];
      if (!one) continue;
      asked.reason = one.finish_reason ?? asked.reason;
      const text = one.text ?? one.delta?.content;
      if (!text) continue;
      asked.tokens++;
      this.stage("decode");
      this.write(text);
    }
  }

  write(text) {
    const { answer } = this.page;
    const follow = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
    answer.append(text);
    if (follow) answer.scrollTop = answer.scrollHeight;
  }

  /** The server's name of the request. */
  known(id) {
    if (choice.mine === id) return;
    choice.own(id);
    this.watch();
  }

  // -- where it is -------------------------------------------------------------------------------

  show(now) {
    this.model = now.model;
    if (!this.asked) return;
    const row = now.watched.find((one) => one.id === choice.mine);
    if (!row) return;
    if (row.state !== "running") {
      this.tell(`${row.state}, place ${whole(row.place)} of ${whole(now[row.state].count)}`);
      return;
    }
    if (row.computed !== undefined) this.stage("prefill");
    const place = `place ${whole(row.place)} of ${whole(now.running.count)} in the batch`;
    this.tell(`${place}, ${count(row.blocks, "block")}, ${count(row.output, "token")}`);
  }

  /** The request has come to a stage; null: it has ended. A stage behind it does not come again. */
  stage(name) {
    const { at, began } = this.asked;
    const order = STAGES.indexOf(name);
    if (name !== null && (at[name] !== undefined || STAGES.slice(order).some((later) => at[later]))) return;
    const now = performance.now();
    if (name !== null) at[name] = name === "waiting" ? began : now;
    for (const item of this.page.stages.children) {
      const begin = at[item.dataset.stage];
      const next = STAGES.slice(STAGES.indexOf(item.dataset.stage) + 1).map((later) => at[later]).find(Boolean);
      const end = next ?? (name === null ? now : undefined);
      item.classList.toggle("now", item.dataset.stage === name);
      item.classList.toggle("done", begin !== undefined && end !== undefined);
      say(item.querySelector("b"), begin !== undefined && end !== undefined ? timed(end - begin) : "");
    }
  }

  tell(words, bad = false) {
    say(this.page.standing, words);
    this.page.standing.classList.toggle("bad", bad);
  }
}
