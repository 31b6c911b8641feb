
// Charts of a report: one run, all data in the page.

const data = JSON.parse(document.getElementById("data").textContent);
const run = { name: "", curves: new Curves(), hidden: false };
run.curves.merge(data.runs[0].bins);
setSpan([run]);
const definitions = new Map(Object.entries(data.definitions));
for (const panel of data.panels) {
  const chart = new Chart(panel, definitions);
  document.getElementById("charts").append(chart.card);
  chart.update([run]);
}
followScheme();
