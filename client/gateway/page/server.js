// The gateway's routes. Every request carries the key that the user has given, if there is one.

const KEY = "trident-api-key";

/** An answer of the server that is an error, with the text it gives. */
export class ServerError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** Send a request; a refused key is asked for, and the request sent again. */
export async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...(key && { Authorization: `Bearer ${key}` }), ...options.headers };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401) throw new ServerError(response.status, await errorText(response));
    await askForKey();
  }
}

let asked = null; // the dialog's answer, shared by all requests that wait for it

function askForKey() {
  asked ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      asked = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asked;
}

async function errorText(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}: ${text.slice(0, 500)}`;
  }
}

/** Yield the JSON events of a chat completion as they come, until `[DONE]`. */
export async function* chatEvents(request, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(request),
    signal,
  });
  let buffer = "";
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const events = (buffer + text).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^event:.*\n/, "").replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ServerError(parsed.error.code, parsed.error.message);
      yield parsed;
    }
  }
  throw new ServerError(0, "the connection was lost before the end of the answer");
}
