// The server's key, which a person enters once for each tab, if the server asks for one.

import { byId } from "./dom.js";

const STORED_AS = `sd_tf ${location.pathname.replace(/[^/]*$/, "")} key`; // also on the docs page

let key = stored();

function stored() {
  try {
    return sessionStorage.getItem(STORED_AS);
  } catch {
    return null; // the browser refuses storage
  }
}

export const isKnown = () => key !== null;

// Returns the headers that go with every call.
export const headers = () => (key === null ? {} : { authorization: `Bearer ${key}` });

// Asks for the key, then calls `again`. A key that is known already was refused.
export function ask(again) {
  byId("key-form").hidden = false;
  byId("key-error").textContent = isKnown() ? "The server does not know this key." : "";
  byId("key").focus();
  byId("key-form").onsubmit = (event) => {
    event.preventDefault();
    const entered = byId("key").value.trim();
    if (!/^[\x21-\x7e]+$/.test(entered)) { // the browser could not send it
      byId("key-error").textContent = "A key has letters, digits and signs of ASCII.";
      return;
    }
    remember(entered);
    byId("key").value = "";
    byId("key-form").hidden = true;
    again();
  };
}

function remember(entered) {
  key = entered;
  try {
    sessionStorage.setItem(STORED_AS, key);
  } catch {
    // Then it is asked for again after a reload.
  }
}
