// The connection with the server. A panel has one request under way; while a person drags, only the
// newest of the requests that wait is sent.
const PATIENCE = 1500; // milliseconds until a panel stops waiting for an answer to send the next

export class Link {
  constructor(onFacts, onState, room = "functions") {
    this.room = room;
    this.onFacts = onFacts;
    this.onState = onState;
    this.panels = new Map(); // name: {number, first, waiting, receive, timer}
    this.number = 0;
    const scheme = location.protocol === "https:" ? "wss:" : "ws:";
    this.socket = new WebSocket(`${scheme}//${location.host}/ws`);
    this.socket.addEventListener("message", (event) => this.receive(JSON.parse(event.data)));
    this.socket.addEventListener("close", () => onState("lost"));
    this.socket.addEventListener("open", () => onState("connected"));
  }

  ask(panel, task, content, receive) {
    const at = this.panels.get(panel) || { number: 0, first: true, waiting: null, timer: 0 };
    this.panels.set(panel, at);
    at.receive = receive;
    if (at.first) this.send(panel, at, task, content);
    else at.waiting = [task, content];
  }

  send(panel, at, task, content) {
    at.number = ++this.number;
    at.first = false;
    at.waiting = null;
    at.sent = performance.now();
    clearTimeout(at.timer);
    at.timer = setTimeout(() => this.next(panel, at), PATIENCE);
    this.put({ type: "ask", room: this.room, task, panel, number: at.number, content });
  }

  next(panel, at) {
    at.first = true;
    if (at.waiting) this.send(panel, at, ...at.waiting);
  }

  cancel(panel) {
    const at = this.panels.get(panel);
    if (!at) return;
    clearTimeout(at.timer);
    this.panels.delete(panel);
    this.put({ type: "cancel", panel });
  }

  put(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  receive(message) {
    if (message.type === "facts") this.onFacts(message.content[this.room], message.content);
    else if (message.type === "refused") this.onState("refused", message.message);
    else if (message.type === "answer") {
      const at = this.panels.get(message.panel);
      if (!at) return;
      if (message.kind !== "cancelled" && message.number <= at.number) {
        const last = message.number === at.number && !at.waiting; // no newer request is on its way
        at.receive(message.kind, message.content, last, performance.now() - at.sent);
      }
      if (message.number === at.number) { clearTimeout(at.timer); this.next(message.panel, at); }
    }
  }
}
