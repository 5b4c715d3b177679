// The tabs, the list of models, and whether the server takes requests.

import { startChat } from "./chat.js";
import { startDashboard } from "./dashboard.js";
import { ask, ServerError } from "./server.js";

const HEALTH_INTERVAL_MS = 5000;
const tabs = [...document.querySelectorAll("[role=tab]")];

function show(tab) {
  for (const each of tabs) {
    const isShown = each === tab;
    each.setAttribute("aria-selected", isShown);
    each.tabIndex = isShown ? 0 : -1;
    document.getElementById(each.getAttribute("aria-controls")).hidden = !isShown;
  }
  location.hash = tab.getAttribute("aria-controls");
}

for (const [place, tab] of tabs.entries()) {
  tab.addEventListener("click", () => show(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    const next = tabs[(place + step + tabs.length) % tabs.length];
    show(next);
    next.focus();
  });
}

async function listModels() {
  const models = await (await ask("v1/models")).json();
  const select = document.getElementById("model");
  select.replaceChildren(...models.data.map(({ id }) => new Option(id, id)));
}

async function watchHealth() {
  const state = document.getElementById("state");
  let isListed = false;
  for (;;) {
    try {
      await ask("health/ready");
      if (!isListed) await listModels();
      isListed = true;
      state.textContent = "ready";
      state.classList.remove("wrong");
    } catch (error) {
      state.textContent = error instanceof ServerError ? error.message : "the server does not answer";
      state.classList.add("wrong");
    }
    await new Promise((resolve) => setTimeout(resolve, HEALTH_INTERVAL_MS));
  }
}

show(tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash) ?? tabs[0]);
startChat();
startDashboard(document.getElementById("dashboard"));
watchHealth();
