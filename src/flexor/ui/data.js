"use strict";
// Datasets: episodes with their videos side by side, curves that follow, what the check found, and those to leave out.

const ROW = 46; // pixels of an episode in the list: only those that can be seen are drawn
const CHECKED_AT_ONCE = 2000; // episodes; a larger dataset is checked when somebody asks
const DRIFT_S = 0.12; // by which videos may differ before they are set right

TABS.data = {
  title: "Data",
  show(place, words) {
    const waiting = make("p", { class: "soft" }, "Opening…");
    place.append(waiting);
    openData(place, words).catch((error) => {
      place.replaceChildren(make("div", { class: "note", role: "alert" }, error.message));
    });
  },
};

async function openData(place, [id, episode]) {
  const datasets = await get("datasets");
  if (!place.isConnected) return;
  if (!datasets.length) {
    place.classList.add("without-data");
    place.replaceChildren(emptyState("No dataset is named", "Start with the folder of a LeRobot dataset, beside the runs:", "flexor ui runs path/to/dataset"));
    return;
  }
  const named = datasets.find((dataset) => dataset.id === id) ?? datasets[0];
  const data = await get(`dataset/${named.id}`);
  if (place.isConnected) new EpisodesView(place, datasets, data, episode === undefined ? data.episodes[0] : Number(episode));
}

/** One dataset: the list on the left, an episode on the right. */
class EpisodesView {
  constructor(place, datasets, data, episode) {
    Object.assign(this, { place, data, filter: "all", text: "", marks: {}, flagged: new Set(), excluded: new Set(data.excluded), episode: null });
    this.numbers = new Map(data.episodes.map((index, number) => [index, number]));
    this.player = make("div", { class: "player" });
    this.sample = sampleView(data);
    this.report = make("div");
    this.status = make("div", { class: "exclude-bar" });
    place.replaceChildren(this.side(datasets), make("div", { class: "episode-view" }, this.player, this.sample.element, this.report));
    this.drawExcluded();
    this.filterRows();
    this.check(data.episodes.length <= CHECKED_AT_ONCE);
    this.open(this.numbers.has(episode) ? episode : data.episodes[0]);
    const keys = (event) => this.press(event);
    addEventListener("keydown", keys);
    onLeave(() => removeEventListener("keydown", keys));
    onLeave(() => cancelAnimationFrame(this.moving));
  }

  side(datasets) {
    const { data } = this;
    const choose = picker(datasets.map(({ id, name }) => [id, name]), data.id, (id) => go("data", id));
    choose.setAttribute("aria-label", "dataset");
    const search = make("input", { type: "search", placeholder: "Number or task", "aria-label": "filter episodes" });
    search.addEventListener("input", () => {
      this.text = search.value.trim().toLowerCase();
      this.filterRows();
    });
    const filter = picker([["all", "all episodes"], ["found", "with findings"], ["excluded", "left out"]], "all", (value) => {
      this.filter = value;
      this.filterRows();
    });
    filter.setAttribute("aria-label", "which episodes");
    this.count = make("div", { class: "soft side-head" });
    this.space = make("div", { class: "space" });
    this.list = make("div", { class: "episode-list", role: "listbox", "aria-label": "episodes", tabindex: "0" }, this.space);
    this.list.addEventListener("scroll", () => this.drawRows());
    new ResizeObserver(() => this.drawRows()).observe(this.list);
    const about_data = [`${plural(data.episodes.length, "episode")}, ${plural(data.frames, "frame")} at ${data.fps} per second`, data.robot ? `robot ${data.robot}` : null, `LeRobot ${data.version}`];
    return make("aside", {}, datasets.length > 1 ? choose : make("h1", {}, data.name), make("p", { class: "soft path" }, data.folder), make("p", { class: "soft" }, about_data.filter(Boolean).join(" · ")), make("div", { class: "side-tools" }, search, filter), this.count, this.list, this.status);
  }

  // The list. Only the rows that can be seen are in the page.

  filterRows() {
    const { data, text } = this;
    const matches = (index, number) => {
      if (this.filter === "found" && !this.flagged.has(index)) return false;
      if (this.filter === "excluded" && !this.excluded.has(index)) return false;
      if (!text) return true;
      return /^\d+$/.test(text) ? String(index).startsWith(text) : (data.tasks[data.episode_tasks[number]] ?? "").toLowerCase().includes(text);
    };
    this.rows = data.episodes.filter(matches);
    this.count.textContent = this.rows.length === data.episodes.length ? plural(data.episodes.length, "episode") : `${this.rows.length.toLocaleString("en")} of ${plural(data.episodes.length, "episode")}`;
    this.space.style.height = `${this.rows.length * ROW}px`;
    this.drawRows();
  }

  drawRows() {
    const first = Math.max(Math.floor(this.list.scrollTop / ROW) - 5, 0);
    const last = Math.min(first + Math.ceil(this.list.clientHeight / ROW) + 10, this.rows.length);
    this.space.replaceChildren(...this.rows.slice(first, last).map((index, number) => this.row(index, first + number)));
  }

  row(index, place) {
    const { data } = this;
    const number = this.numbers.get(index);
    const row = make(
      "div",
      { class: `episode-row${this.excluded.has(index) ? " out" : ""}`, role: "option", "aria-selected": String(index === this.episode), id: `row-${index}` },
      make("div", {}, make("b", {}, `Episode ${index}`), this.flagged.has(index) ? make("span", { class: "warn", title: "the check found something", role: "img", "aria-label": "the check found something" }, " ▲") : null, make("span", { class: "soft figures" }, duration(data.lengths[number] / data.fps))),
      make("div", { class: "soft" }, data.tasks[data.episode_tasks[number]] ?? ""),
    );
    row.style.top = `${place * ROW}px`;
    row.addEventListener("click", () => this.open(index));
    return row;
  }

  move(by) {
    const place = this.rows.indexOf(this.episode);
    const next = this.rows[Math.min(Math.max(place + by, 0), this.rows.length - 1)];
    if (next === undefined || next === this.episode) return;
    const top = this.rows.indexOf(next) * ROW;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    if (top + ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW - this.list.clientHeight;
    this.open(next);
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input:not([type=range]), select, textarea, button, a, video, summary")) return;
    const actions = { " ": () => this.play(), x: () => this.exclude(this.episode), ArrowUp: () => this.move(-1), ArrowDown: () => this.move(1), ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1) };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  // Episodes to leave out.

  async exclude(index) {
    if (this.excluded.has(index)) this.excluded.delete(index);
    else this.excluded.add(index);
    this.drawExcluded();
    this.filter === "excluded" ? this.filterRows() : this.drawRows();
    this.leaveOut.querySelector("input").checked = this.excluded.has(this.episode);
    try {
      await send(`exclude/${this.data.id}`, { episodes: [...this.excluded] });
      this.drawExcluded();
    } catch (error) {
      this.drawExcluded(error.message);
    }
  }

  drawExcluded(problem = null) {
    const count = this.excluded.size;
    const text = problem ? `Not saved: ${problem}` : count ? `${plural(count, "episode")} left out. Train without ${count === 1 ? "it" : "them"}:` : "Press x, or tick a box, to leave an episode out.";
    this.status.replaceChildren(make("p", { class: problem ? "error" : "soft", role: "status" }, text), count && !problem ? commandBox(`--dataset.exclude_episodes=@${this.data.list}`) : "");
  }

  // An episode.

  async open(index) {
    this.pause();
    this.episode = index;
    this.drawRows();
    this.list.setAttribute("aria-activedescendant", `row-${index}`);
    history.replaceState(null, "", `#data/${this.data.id}/${index}`);
    try {
      const episode = await get(`episode/${this.data.id}/${index}`);
      if (this.episode === index && this.player.isConnected) this.draw(episode);
    } catch (error) {
      if (this.episode === index) this.player.replaceChildren(make("div", { class: "note", role: "alert" }, error.message));
    }
  }

  draw(episode) {
    const { data } = this;
    this.length = episode.length;
    this.frame = 0;
    this.videos = episode.videos.map((video) => new EpisodeVideo(data, episode, video));
    const marks = this.marks[episode.index] ?? [];
    const curves = decodedCurves(data.curves, episode.curves, episode.every, episode.length);
    this.plots = data.curves.map((feature, number) => curvePlot(feature.name, sameAxis(curves[number]), episode.every, episode.length, marksOf(marks, feature.name, data)));
    this.plots.forEach((plot) => this.listen(plot, episode));
    this.range = make("input", { type: "range", min: 0, max: episode.length - 1, step: 1, value: 0, class: "seek", "aria-label": "frame" });
    this.range.addEventListener("input", () => this.show(Number(this.range.value), true));
    this.where = make("span", { class: "soft figures" });
    this.button = make("button", { type: "button", class: "main play" }, "Play");
    this.button.addEventListener("click", () => this.play());
    this.leaveOut = checkbox("Leave out (x)", this.excluded.has(episode.index), () => this.exclude(episode.index));
    const found = marks.map((mark) => {
      const button = make("button", { type: "button", class: "finding-button", title: mark.text }, make("span", { class: mark.severity }, "▲ "), `frame ${mark.frame}: ${[mark.kind, mark.feature].filter(Boolean).join(", ")}`);
      button.addEventListener("click", () => this.show(Math.min(mark.frame, episode.length - 1), true));
      return button;
    });
    this.player.replaceChildren(
      make("div", { class: "run-top" }, make("h1", {}, `Episode ${episode.index}`), this.leaveOut),
      make("p", { class: "soft" }, [...episode.tasks, plural(episode.length, "frame"), duration(episode.length / data.fps)].join(" · ")),
      make("div", { class: "cameras" }, this.videos.map((video) => video.element)),
      make("div", { class: "controls" }, this.button, this.range, this.where),
      found.length ? make("div", { class: "marks" }, found) : "",
      make("div", { class: "episode-plots" }, this.plots.map((plot) => plot.element)),
      make("p", { class: "soft hint" }, "space plays, ← → step, ↑ ↓ change the episode"),
    );
    this.show(0, true);
  }

  listen(plot, episode) {
    const frameAt = (event) => {
      const box = plot.svg.getBoundingClientRect();
      return Math.round(plot.at(Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1)));
    };
    plot.svg.addEventListener("pointerdown", (event) => this.show(Math.min(frameAt(event), episode.length - 1), true));
    plot.svg.addEventListener("pointermove", (event) => event.buttons && this.show(Math.min(frameAt(event), episode.length - 1), true));
  }

  /** Everything at a frame; `seek` also moves the videos. */
  show(frame, seek) {
    this.frame = frame;
    this.plots.forEach((plot) => plot.show(frame));
    this.range.value = frame;
    this.where.textContent = `frame ${frame.toLocaleString("en")} · ${(frame / this.data.fps).toFixed(2)} s`;
    if (!this.moving) this.sample.at(this.episode, frame);
    if (seek) this.videos.forEach((video) => video.seek(frame));
  }

  step(by) {
    this.pause();
    this.show(Math.min(Math.max(this.frame + by, 0), this.length - 1), true);
  }

  /** Plays all cameras at the speed at which they were recorded; the curves follow the first one. */
  play() {
    if (this.moving) {
      this.pause();
      return;
    }
    if (this.frame >= this.length - 1) this.show(0, true);
    this.videos.forEach((video) => video.play());
    this.button.textContent = "Pause";
    const begun = performance.now() - (1000 * this.frame) / this.data.fps;
    const follow = () => {
      const lead = this.videos.find((video) => video.isPlaying);
      const frame = lead ? lead.frame() : Math.floor(((performance.now() - begun) / 1000) * this.data.fps);
      if (frame >= this.length - 1) {
        this.pause();
        this.show(this.length - 1, true);
        return;
      }
      if (lead) this.videos.forEach((video) => video.follow(lead));
      this.show(Math.max(frame, 0), false);
      this.moving = requestAnimationFrame(follow);
    };
    this.moving = requestAnimationFrame(follow);
  }

  pause() {
    cancelAnimationFrame(this.moving);
    this.moving = null;
    this.videos?.forEach((video) => video.pause());
    if (this.button) this.button.textContent = "Play";
    if (this.videos) this.sample.at(this.episode, this.frame);
  }

  // What the check found.

  async check(now) {
    if (!now) {
      const button = make("button", { type: "button" }, "Check this dataset");
      button.addEventListener("click", () => this.check(true));
      this.report.replaceChildren(card("Check", make("p", { class: "soft" }, `It has ${plural(this.data.episodes.length, "episode")}: the check may take minutes.`), button));
      return;
    }
    const text = make("p", { class: "soft", role: "status" }, "Checking…");
    this.report.replaceChildren(card("Check", text));
    while (this.place.isConnected) {
      let result;
      try {
        result = await get(`check/${this.data.id}`);
      } catch (error) {
        text.textContent = error.message;
        return;
      }
      if (result.checking) {
        const [done, total] = result.checking;
        text.textContent = total ? `Checking… ${percent(done / total)}` : "Checking…";
        await new Promise((resolve) => setTimeout(resolve, 300));
        continue;
      }
      this.takeReport(result);
      return;
    }
  }

  takeReport(result) {
    this.marks = result.marks;
    this.flagged = new Set(result.groups.flatMap((group) => group.episodes.map(([index]) => index)));
    const verdict = result.errors ? make("p", { class: "error" }, `${plural(result.errors, "error")}, ${plural(result.warnings, "warning")}.`) : make("p", { class: result.warnings ? "warning" : "good" }, result.warnings ? `No errors, ${plural(result.warnings, "warning")}.` : "No problems found.");
    this.report.replaceChildren(card("Check", verdict, make("p", { class: "soft" }, "Videos were not decoded for it: flexor data check does that."), result.groups.map((group) => this.finding(group))));
    this.filterRows();
    if (this.marks[this.episode]) this.open(this.episode);
  }

  finding(group) {
    const places = group.episodes.slice(0, 60).map(([index, frame]) => {
      const button = make("button", { type: "button", class: "quiet" }, frame === null ? `${index}` : `${index}, frame ${frame}`);
      button.addEventListener("click", async () => {
        await this.open(index);
        if (frame !== null && this.plots) this.show(Math.min(frame, this.length - 1), true);
      });
      return button;
    });
    const out = make("button", { type: "button" }, `Leave out ${plural(group.episodes.length, "episode")}`);
    out.addEventListener("click", () => {
      group.episodes.forEach(([index]) => this.excluded.add(index));
      this.excluded.delete(this.episode);
      if (group.episodes.some(([index]) => index === this.episode) || !this.excluded.size) this.exclude(this.episode);
      else send(`exclude/${this.data.id}`, { episodes: [...this.excluded] }).then(() => this.drawExcluded(), (error) => this.drawExcluded(error.message));
      this.filterRows();
    });
    return make(
      "div",
      { class: `finding ${group.severity === "error" ? "alarm" : ""}` },
      make("h3", {}, group.kind, group.feature ? make("small", { class: "soft" }, ` ${group.feature}`) : null),
      group.messages.map((message) => make("p", {}, message)),
      group.more ? make("p", { class: "soft" }, `and ${group.more} similar ones`) : null,
      make("p", { class: "change" }, group.fix),
      places.length ? make("div", { class: "finding-places" }, make("span", { class: "soft" }, "Episodes "), places, group.episodes.length > 60 ? make("span", { class: "soft" }, ` and ${group.episodes.length - 60} more`) : null, out) : null,
    );
  }
}

/** The marks of a feature, and those of columns that are not drawn. */
function marksOf(marks, name, data) {
  const others = [...data.curves.map((feature) => feature.name), ...data.cameras].filter((other) => other !== name);
  return marks.filter((mark) => !others.includes(mark.feature)).map((mark) => ({ ...mark, text: `${mark.kind}: ${mark.text}` }));
}

/** A camera's video of an episode: a part of a file, or a clip of its own where a browser can't play the file. */
class EpisodeVideo {
  constructor(data, episode, { camera, start, stop, problem }) {
    const path = `${data.id}/${episode.index}/${encodeURIComponent(camera)}`;
    this.video = make("video", { preload: "auto", playsinline: "", tabindex: "-1", "aria-label": camera });
    this.video.muted = true;
    this.fps = data.fps;
    const useClip = () => {
      Object.assign(this, { start: 0, rate: 1 });
      this.video.src = address(`episode-clip/${path}`);
      this.seek(this.wanted ?? 0);
    };
    this.note = make("figcaption", { class: "soft" }, problem ? `${camera}: ${problem}` : camera);
    if (start === undefined) useClip();
    else {
      Object.assign(this, { start, rate: (stop - start) / (episode.length / data.fps) || 1 });
      this.video.src = address(`episode-video/${path}`);
      this.video.addEventListener("error", useClip, { once: true });
    }
    this.element = make("figure", {}, this.video, this.note);
  }

  get isPlaying() {
    return !this.video.paused && this.video.readyState >= 2;
  }

  time(frame) {
    return this.start + ((frame + 0.5) / this.fps) * this.rate; // the middle of a frame, which rounding can't miss
  }

  frame() {
    return Math.floor(((this.video.currentTime - this.start) / this.rate) * this.fps + 1e-3);
  }

  seek(frame) {
    this.wanted = frame;
    this.video.currentTime = this.time(frame);
  }

  play() {
    this.video.playbackRate = this.rate;
    this.video.play().catch(() => {}); // the error is shown by the browser
  }

  pause() {
    this.video.pause();
  }

  follow(lead) {
    if (this === lead || !this.isPlaying) return;
    const frame = lead.frame();
    if (Math.abs(this.frame() - frame) > DRIFT_S * this.fps) this.seek(frame);
  }
}
