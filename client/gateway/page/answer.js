// One message of the conversation, and an answer that grows.

const SHORTEST_S = 0.02; // in which tokens are counted to a rate

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

/** Return what is shown for a message of the user, or of a tool under its title. */
export function messageElement({ role, content }, title) {
  if (role !== "tool") return element("article", role, element("div", "text", content));
  const folded = element("details", "call", element("summary", "", title), element("pre", "", content));
  folded.open = true;
  return element("article", role, folded);
}

/** An answer: its text, its reasoning and its tool calls, folded, and how fast it came. */
export class Answer {
  constructor() {
    this.calls = []; // {id, name, arguments}
    this.content = "";
    this.reasoning = "";
    this.began = performance.now();
    this.firstAt = null;
    this.firstTokens = 0; // that came at once
    this.usage = null;
    this.finishReason = null;
    this.thoughts = element("div", "text");
    this.folded = element("details", "", element("summary", "", "Reasoning"), this.thoughts);
    this.folded.hidden = true;
    this.body = element("div", "text");
    this.callList = element("div", "");
    this.figures = element("p", "figures", "waiting for the first token");
    this.element = element("article", "assistant", this.folded, this.body, this.callList, this.figures);
  }

  /** Take an event of the stream. */
  add(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
    if ((content || reasoning || calls) && this.firstAt === null) {
      this.firstAt = performance.now();
      this.firstTokens = this.usage?.completion_tokens ?? 1;
    }
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (reasoning) {
      this.reasoning += reasoning;
      this.thoughts.append(reasoning);
      this.folded.hidden = false;
    }
    if (content) {
      this.content += content;
      this.body.append(content);
    }
    for (const call of calls ?? []) this.#addToCall(call);
    if (this.firstAt !== null) this.figures.textContent = this.#describe();
  }

  #addToCall({ index, id, function: { name, arguments: text } }) {
    if (!this.calls[index]) {
      this.calls[index] = { id, name, arguments: "" };
      const folded = element("details", "call", element("summary", "", `Call of ${name}`), element("pre", ""));
      this.callList.append(folded);
    }
    this.calls[index].arguments += text ?? "";
    this.callList.children[index].lastChild.append(text ?? "");
  }

  /** The stream is over; `reason` says why if it is not complete. */
  end(reason) {
    renderCode(this.body, this.content);
    this.figures.textContent = this.#describe();
    if (reason === "stopped") this.figures.append(", stopped");
    else if (reason) this.element.append(element("p", "error", reason));
  }

  #describe() {
    if (this.firstAt === null) return "no token";
    const ttft = this.firstAt - this.began;
    const parts = [`first token after ${ttft.toFixed(0)} ms`];
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens } = this.usage;
      const seconds = (performance.now() - this.firstAt) / 1000;
      if (tokens > this.firstTokens && seconds > SHORTEST_S) {
        parts.push(`${((tokens - this.firstTokens) / seconds).toFixed(1)} tokens/s`);
      }
      parts.push(`${prompt} + ${tokens} tokens`);
    }
    if (this.finishReason === "length") parts.push("cut off at the limit of tokens");
    return parts.join(", ");
  }

  get isEmpty() {
    return !(this.content || this.reasoning || this.calls.length);
  }

  /** The calls, unless the answer was cut off in one. */
  get completeCalls() {
    return this.finishReason === "tool_calls" ? this.calls : [];
  }

  /** Return it as the API takes it back. */
  message() {
    return {
      role: "assistant",
      content: this.content,
      ...(this.reasoning && { reasoning_content: this.reasoning }),
      ...(this.completeCalls.length && {
        tool_calls: this.calls.map((call) => ({
          id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
        })),
      }),
    };
  }
}

/** Show fenced code as code; all else is plain text. */
function renderCode(body, text) {
  const parts = text.split(/^```.*\n?/m); // every second part is inside fences
  if (parts.length < 3) return;
  body.replaceChildren(...parts.map((part, place) => (place % 2 ? element("pre", "", part) : part)));
}
