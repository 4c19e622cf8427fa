"use strict";
for (const article of document.querySelectorAll("article")) {
  const sections = [...article.querySelectorAll("section")];
  if (!sections.length) continue;
  const player = article.querySelector(".player"), slider = player.querySelector("input");
  const marked = [...article.querySelectorAll("[data-section]:not(section)")];
  const show = (index) => {
    const now = Math.min(Math.max(index, 0), sections.length - 1);
    slider.value = now;
    slider.setAttribute("aria-valuetext", sections[now].querySelector("h3").textContent);
    sections.forEach((section, i) => { section.hidden = i !== now; });
    for (const each of marked) {
      const at = Number(each.dataset.section);
      each.classList.toggle("now", at === now);
      each.classList.toggle("later", at > now && each.tagName === "SPAN");
    }
    const token = article.querySelector(".output .now"), box = token && token.parentElement;
    if (token) box.scrollTop = Math.max(0, token.offsetTop - box.offsetTop - box.clientHeight / 2);
  };
  const current = () => Number(slider.value);
  slider.addEventListener("input", () => show(current()));
  player.querySelectorAll("button").forEach((button) => {
    button.addEventListener("click", () => show(current() + Number(button.dataset.move)));
  });
  for (const each of marked) each.addEventListener("click", () => show(Number(each.dataset.section)));
  document.addEventListener("keydown", (event) => {
    if (event.target === slider || event.ctrlKey || event.metaKey || event.altKey) return;
    const box = article.getBoundingClientRect();
    if (box.bottom < 0 || box.top > innerHeight) return; // of several generations, those in view
    const index = { ArrowLeft: current() - 1, ArrowRight: current() + 1, Home: 0, End: sections.length - 1 }[event.key];
    if (index === undefined) return;
    event.preventDefault();
    show(index);
  });
  player.hidden = false;
  show(sections.length > 1 ? 1 : 0);
}
