// The state of a room in the address, and the buttons of every room: link, file, Python.
import { LONGEST, StateError, pack, unpack } from "/pages/state.js";
import { PATHS } from "/pages/page.js";
import { text } from "/pages/strings.js";

const $ = (id) => document.getElementById(id);

export function say(message) { $("said").textContent = message; }

export function warn(message) {
  $("message").textContent = message;
  $("message").hidden = !message;
}

export function note(message) {
  $("state").textContent = message;
  setTimeout(() => { if ($("state").textContent === message) $("state").textContent = text.connected; }, 4000);
}

// `room` has state(), checked(found), take(state) and defaults().
export class Address {
  constructor(room, name) {
    this.room = room;
    this.name = name;
    this.packing = Promise.resolve();
    this.pending = 0;
    this.current = "";
    this.tour = null; // the lesson, whose step follows the state after a slash
  }

  // Write the state into the address: at once and as an entry of the history, or soon and in place.
  remember(push) {
    clearTimeout(this.pending);
    this.pending = setTimeout(() => { this.packing = this.packing.then(() => this.write(push)); }, push ? 0 : 250);
  }

  async write(push) {
    const packed = (await pack(this.room.state())) + (this.tour ? this.tour.suffix : "");
    if (packed === this.current) return;
    if (packed.length > LONGEST) { warn(text.tooLong); return; }
    if ($("message").textContent === text.tooLong) warn("");
    this.current = packed;
    const address = `${location.pathname}#${packed}`;
    if (push) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
  }

  async load() {
    clearTimeout(this.pending);
    this.current = location.hash.slice(1);
    const [packed, step] = this.current.split("/");
    if (this.tour) this.tour.enter(step);
    if (!packed) { this.room.take(this.room.defaults()); if (this.room.started) this.room.started(); return; }
    try {
      const found = this.room.checked(await unpack(packed));
      this.room.take(found);
      warn("");
    } catch (error) {
      if (!(error instanceof StateError)) throw error;
      this.room.take(this.room.defaults());
      warn(error.kind === "newer" ? text.newer : text.malformed);
    }
  }

  // Go to a state of this room or of another one; the suffix is that of a lesson.
  async go(name, state, suffix = "") {
    const packed = (await pack(state)) + suffix;
    clearTimeout(this.pending);
    if (name !== this.name) { location.href = `${PATHS[name]}#${packed}`; return; }
    history.pushState(null, "", `${location.pathname}#${packed}`);
    await this.load();
  }

  listen() {
    $("link").addEventListener("click", async () => {
      await this.write(false);
      const address = `${location.origin}${location.pathname}#${await pack(this.room.state())}`;
      try { await navigator.clipboard.writeText(address); say(text.linkCopied); note(text.linkCopied); }
      catch { note(text.linkFailed); }
    });
    $("save").addEventListener("click", () => {
      const content = JSON.stringify({ doxa_studio: 1, room: this.name, state: this.room.state() }, null, 1);
      const anchor = document.createElement("a");
      anchor.href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
      anchor.download = "doxa-studio.json";
      anchor.click();
      setTimeout(() => URL.revokeObjectURL(anchor.href), 1000);
    });
    $("open").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", async () => {
      const file = $("file").files[0];
      $("file").value = "";
      if (!file) return;
      try {
        if (file.size > 1e6) throw new StateError("malformed");
        const found = JSON.parse(await file.text());
        if (found.doxa_studio > 1) throw new StateError("newer");
        const name = found.room || "functions";
        if (name !== this.name && Object.hasOwn(PATHS, name)) { await this.go(name, found.state); return; }
        this.room.take(this.room.checked(found.state));
        warn("");
        this.remember(true);
      } catch (error) { warn(error.kind === "newer" ? text.newer : text.malformed); }
    });
    $("python-close").addEventListener("click", () => $("python").close());
    $("python-copy").addEventListener("click", async () => {
      await navigator.clipboard.writeText($("python-text").textContent).catch(() => {});
      $("python-copy").textContent = text.copied;
      setTimeout(() => { $("python-copy").textContent = text.copy; }, 1500);
    });
    addEventListener("popstate", () => this.load());
    addEventListener("hashchange", () => { if (location.hash.slice(1) !== this.current) this.load(); });
  }
}
