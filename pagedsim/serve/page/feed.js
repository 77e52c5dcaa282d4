// Snapshots of the server as they come, and whether they come.

const AGAIN = 1000; // ms until the next try
const LATE = 3000; // ms without news

export class Feed {
  /** `shown(snapshot)` gets the newest at most once a frame; `linked(state, words)` the state. */
  constructor(shown, linked) {
    this.shown = shown;
    this.linked = linked;
    this.watched = [];
    this.newest = null;
    this.heard = 0;
    setInterval(() => this.check(), 500);
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    if (!document.hidden) this.open();
  }

  /** Of these requests everything is wanted. */
  watch(ids) {
    if (ids.join("\n") === this.watched.join("\n")) return;
    this.watched = ids;
    if (this.source) this.open();
  }

  open() {
    this.close();
    const query = new URLSearchParams(this.watched.map((id) => ["watch", id]));
    const source = (this.source = new EventSource(`live?${query}`));
    source.onmessage = (event) => {
      this.heard = performance.now();
      const waiting = this.newest !== null;
      this.newest = event.data;
      if (!waiting) requestAnimationFrame(() => this.show());
    };
    source.onerror = () => {
      this.close();
      this.linked("lost", "connection lost, trying again");
      this.timer = setTimeout(() => this.open(), AGAIN);
    };
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  show() {
    const snapshot = JSON.parse(this.newest);
    this.newest = null;
    if (snapshot.failure) {
      this.linked("failed", snapshot.failure);
    } else {
      this.linked("live", "live");
      this.shown(snapshot);
    }
  }

  check() {
    const quiet = performance.now() - this.heard;
    if (this.source && this.heard && quiet > LATE) {
      this.linked("late", `no news for ${Math.round(quiet / 1000)} s`);
    }
  }
}
