// The conversation: sends messages, shows answers as they come, and stops them.

import { Answer, messageElement } from "./answer.js";
import { chatEvents } from "./server.js";

const byId = (id) => document.getElementById(id);
let conversation = []; // messages as the API takes them, without the system message
let running = null; // the AbortController of the answer that is being streamed

export function startChat() {
  const prompt = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if (!text || running) return;
    prompt.value = "";
    say([{ role: "user", content: text }]);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("composer").requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    conversation = [];
    byId("conversation").replaceChildren();
    prompt.focus();
  });
  prompt.focus();
}

/** Add messages of the user, or of tools with their titles, and stream the answer to them. */
async function say(said, titles = []) {
  const messages = conversation; // a new chat may be begun meanwhile
  said.forEach((message, place) => append(messageElement(message, titles[place])));
  const answer = new Answer();
  append(answer.element);
  running = new AbortController();
  setRunning(true);
  try {
    for await (const event of chatEvents(request([...messages, ...said]), running.signal)) {
      const isAtEnd = isScrolledToEnd();
      answer.add(event);
      if (isAtEnd) scrollToEnd();
    }
    answer.end();
  } catch (error) {
    answer.end(error.name === "AbortError" ? "stopped" : error.message);
  } finally {
    running = null;
    setRunning(false);
  }
  if (answer.isEmpty) return; // neither is part of what the model is shown next
  messages.push(...said, answer.message());
  if (messages === conversation && answer.completeCalls.length) {
    append(resultsForm(answer.completeCalls));
  }
}

/** Return the request for an answer to `messages`, with the parameters that are set. */
function request(messages) {
  const body = {
    model: byId("model").value || undefined, // the list may be yet to come: the server has a default
    messages,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const { name, value, type } of document.querySelectorAll("#parameters [name]")) {
    if (value.trim() === "") continue;
    if (name === "system") body.messages.unshift({ role: "system", content: value });
    else if (name === "tools") body.tools = parsedTools(value);
    else body[name] = type === "number" ? Number(value) : value;
  }
  return body;
}

function parsedTools(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: not valid JSON: ${error.message}`);
  }
}

/** Return the form in which the user gives the results of tool calls. */
function resultsForm(calls) {
  const form = document.createElement("form");
  const inputs = calls.map((call) => {
    const input = document.createElement("input");
    input.placeholder = `Result of ${call.name}`;
    input.setAttribute("aria-label", input.placeholder);
    return input;
  });
  const send = document.createElement("button");
  send.textContent = "Send results";
  form.className = "result";
  form.append(...inputs, send);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    form.remove();
    const results = calls.map((call, place) => ({
      role: "tool", tool_call_id: call.id, content: inputs[place].value,
    }));
    say(results, inputs.map((input) => input.placeholder));
  });
  return form;
}

function append(element) {
  byId("conversation").append(element);
  scrollToEnd();
}

function setRunning(isRunning) {
  byId("stop").hidden = !isRunning;
  byId("send").disabled = isRunning;
  byId("conversation").setAttribute("aria-busy", isRunning);
}

function isScrolledToEnd() {
  return innerHeight + scrollY >= document.documentElement.scrollHeight - 40;
}

function scrollToEnd() {
  scrollTo({ top: document.documentElement.scrollHeight });
}
