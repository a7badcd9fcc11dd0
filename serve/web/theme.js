// Not a module: it runs before the first paint, so that a chosen theme does not flash.
(() => {
  try {
    const chosen = JSON.parse(localStorage.getItem("millrace.theme"));
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // No storage here: the system's preference holds.
  }
})();
