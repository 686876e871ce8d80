"use strict";
(() => {
  const link = document.createElement("a");
  document.getElementById("download").addEventListener("click", () => {
    const text = document.getElementById("data").textContent;
    const run = JSON.parse(text);
    link.href ||= URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = `penstock-${run.suite}-${run.machine.date}`.replace(/[^\w-]+/g, "-") + ".json";
    link.click();
  });
})();
