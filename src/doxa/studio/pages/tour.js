// A lesson: states of rooms, each with a sentence, and a question to answer before the next is seen.
// The states come from the server; sentences and questions are in the catalogue.
import { text } from "/pages/strings.js";

const make = (name, properties = {}, ...children) => {
  const found = Object.assign(document.createElement(name), properties);
  found.append(...children);
  return found;
};

export class Tour {
  constructor(address, lessons) {
    this.address = address;
    this.lessons = lessons;
    this.lesson = null;
    this.step = 0;
    this.element = make("section", { className: "card tour", hidden: true });
    document.querySelector("main").prepend(this.element);
    addEventListener("keydown", (event) => this.key(event));
    this.present(sessionStorage.getItem("doxa-presenter") === "yes");
  }

  get suffix() { return this.lesson ? `/${this.lesson.name}.${this.step}` : ""; }

  get words() { return text.lessons[this.lesson.name]; }

  // The answers of this lesson so far, by step.
  get answers() {
    try { return JSON.parse(sessionStorage.getItem(`doxa-lesson-${this.lesson.name}`)) || {}; } catch { return {}; }
  }

  answer(i) {
    const answers = { ...this.answers, [this.step]: i };
    sessionStorage.setItem(`doxa-lesson-${this.lesson.name}`, JSON.stringify(answers));
    this.show();
    this.next.focus();
  }

  // The step that the address names, such as few-particles.2; without one there is no lesson.
  enter(named) {
    const found = /^([\w-]{1,40})\.(\d{1,3})$/.exec(named || "");
    const lesson = found && this.lessons.find((one) => one.name === found[1] && text.lessons[one.name]);
    this.lesson = lesson && Number(found[2]) < lesson.steps.length ? lesson : null;
    this.step = this.lesson ? Number(found[2]) : 0;
    this.show();
  }

  go(step) {
    const { room, state } = this.lesson.steps[step];
    this.address.go(room, state, `/${this.lesson.name}.${step}`);
  }

  get answered() { return this.step in this.answers || !this.words.steps[this.step].ask; }

  get last() { return this.step === this.lesson.steps.length - 1; }

  present(yes) {
    this.presenting = yes;
    sessionStorage.setItem("doxa-presenter", yes ? "yes" : "no");
    document.documentElement.classList.toggle("presenter", yes && Boolean(this.lesson));
    dispatchEvent(new Event("resize"));
  }

  show() {
    this.element.hidden = !this.lesson;
    document.documentElement.classList.toggle("touring", Boolean(this.lesson));
    this.present(this.presenting);
    // During a lesson the panels come before the controls of the room.
    const bar = document.querySelector(".bar"), panels = document.getElementById("panels");
    if (this.lesson && bar.compareDocumentPosition(panels) & 4) panels.after(bar);
    else if (!this.lesson && bar.compareDocumentPosition(panels) & 2) panels.before(bar);
    if (!this.lesson) return;
    const words = this.words, step = words.steps[this.step], answers = this.answers;
    this.element.setAttribute("aria-label", words.title);
    const button = (label, act, properties = {}) => {
      const found = make("button", { type: "button", className: "quiet", textContent: label, ...properties });
      found.addEventListener("click", act);
      return found;
    };
    const presenter = button(text.presenter, () => { this.present(!this.presenting); this.show(); });
    presenter.setAttribute("aria-pressed", String(this.presenting));
    const head = make("div", { className: "head" },
      make("h2", { textContent: words.title }),
      make("p", { className: "muted", textContent: text.lessonStep(this.step + 1, this.lesson.steps.length) }),
      make("div", { className: "tools" }, presenter, button(text.lessonReset, () => this.go(this.step)), button(text.lessonLeave, () => this.leave())),
    );
    const inner = [head];
    const before = words.steps[this.step - 1], chosen = answers[this.step - 1];
    if (before && before.ask && chosen !== undefined) {
      inner.push(make("p", { className: "muted", textContent: text.lessonAnswered(before.options[chosen], chosen === before.right) }));
    }
    inner.push(make("p", { className: "say", textContent: step.say }));
    if (step.ask) inner.push(this.question(step, answers[this.step], button));
    this.next = this.last
      ? make("a", { className: "primary", href: "/lessons", textContent: text.lessonAll })
      : button(text.lessonNext, () => this.go(this.step + 1), { className: "primary", disabled: !this.answered });
    const foot = make("div", { className: "tools" },
      button(text.lessonBack, () => this.go(this.step - 1), { disabled: this.step === 0 }), this.next);
    if (step.ask && !this.answered) foot.append(button(text.lessonReveal, () => this.answer(step.right)));
    inner.push(foot);
    if (this.presenting) inner.push(make("p", { className: "muted", textContent: text.presenterKeys }));
    this.element.replaceChildren(...inner);
  }

  question(step, chosen, button) {
    const options = step.options.map((option, i) => {
      const one = button(option, () => this.answer(i), { className: "option" });
      one.setAttribute("aria-pressed", String(chosen === i));
      if (chosen !== undefined && i === step.right) one.append(make("span", { className: "chip good", textContent: text.lessonRight }));
      else if (chosen === i) one.append(make("span", { className: "chip warn", textContent: text.lessonWrong }));
      return one;
    });
    return make("fieldset", {}, make("legend", { textContent: step.ask }), ...options);
  }

  leave() {
    this.lesson = null;
    this.show();
    this.address.remember(true);
  }

  // Presenter mode: the arrow keys go through the lesson, R reveals, Home resets, Escape ends.
  key(event) {
    if (!this.lesson || !this.presenting || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea, canvas, dialog")) return;
    const step = this.words.steps[this.step];
    const reveal = () => { if (!this.answered) this.answer(step.right); };
    if (event.key === "ArrowRight" || event.key === "PageDown") {
      if (!this.answered) reveal();
      else if (!this.last) this.go(this.step + 1);
    } else if (event.key === "ArrowLeft" || event.key === "PageUp") {
      if (this.step > 0) this.go(this.step - 1);
    } else if (event.key.toLowerCase() === "r") reveal();
    else if (event.key === "Home") this.go(this.step);
    else if (event.key === "Escape") { this.present(false); this.show(); } else return;
    event.preventDefault();
  }
}
