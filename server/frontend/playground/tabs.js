// --- lists of tabs: click, arrow keys, Home and End ---

const tabsOf = (list) => [...list.querySelectorAll("[role=tab]:not([hidden])")];

function selectTab(list, id) {
  for (const tab of tabsOf(list)) {
    tab.setAttribute("aria-selected", tab.id === id);
    tab.tabIndex = tab.id === id ? 0 : -1;
  }
}

function followTabs(list, choose) { // `choose` gets the tab's id
  list.addEventListener("click", ({ target }) => {
    const tab = target.closest("[role=tab]");
    if (tab) choose(tab.id);
  });
  list.addEventListener("keydown", (event) => {
    const tabs = tabsOf(list);
    const at = tabs.indexOf(event.target);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    const tab = tabs.at(next % tabs.length);
    choose(tab.id);
    tab.focus();
  });
}
