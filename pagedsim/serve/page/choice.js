// Which request is looked at: under the pointer, pinned by a click, or sent from this page.

class Choice {
  hovered = null;
  pinned = null;
  mine = null;
  listeners = [];

  /** The request that stands out, if any. */
  get looked() {
    return this.hovered ?? this.pinned;
  }

  hover(id) {
    if (this.hovered !== id) this.set({ hovered: id });
  }

  /** Pin it, or let it go if it is pinned. */
  pin(id) {
    this.set({ pinned: this.pinned === id ? null : id });
  }

  own(id) {
    this.set({ mine: id });
  }

  set(change) {
    Object.assign(this, change);
    for (const listener of this.listeners) listener();
  }

  /** Call `listener` whenever anything of it changes. */
  listen(listener) {
    this.listeners.push(listener);
  }
}

export const choice = new Choice();
addEventListener("keydown", (event) => {
  if (event.key === "Escape") choice.set({ hovered: null, pinned: null });
});
