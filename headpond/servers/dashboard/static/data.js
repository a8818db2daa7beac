// Where pages get their JSON: from the server, or from the file itself if this is a report.

let embedded = null;

export function isReport() {
  return report() !== null;
}

function report() {
  if (embedded === null) {
    const element = document.getElementById("report-data");
    embedded = element ? JSON.parse(element.textContent) : undefined;
  }
  return embedded ?? null;
}

export class Problem extends Error {}

export async function get(path, query) {
  const words = new URLSearchParams(Object.entries(query || {}).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const address = words.size ? `${path}?${words}` : path;
  if (report()) {
    const found = report()[address];
    if (found === undefined) throw new Problem("This is not part of the report. `headpond dashboard RUN_DIR` shows it while the run directory is there.");
    return found;
  }
  let response;
  try {
    response = await fetch(`/api/${address}`, { headers: { accept: "application/json" } });
  } catch {
    throw new Problem("The dashboard's server does not answer.");
  }
  const content = await response.json();
  if (!response.ok) throw new Problem(content.error);
  return content;
}
