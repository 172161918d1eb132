// Ranks the sections of the site (SECTIONS, by site_search.py) by a question, and shows the pages with an excerpt each.
// BM25 over words without endings; a word in the title of a page or of a section counts as several in the text.

const COMMON = new Set(("a an and are as at be by can do does for from get has have how i if in into is it its me my not of "
  + "on or so than that the there this to use using what when where which while who why will with without you").split(" "));

// Pages that readers come to last.
const LATER = /bibliography|papers|architecture|errors|trillion|CHANGELOG|benchmarks|studies/;

function stem(word) {
  const short = word.replace(/(ing|ed|es|s)$/, "");
  return short.length > 2 ? short.replace(/(.)\1$/, "$1").replace(/e$/, "") : word;
}

function words(text) {
  return text.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter((word) => word && !COMMON.has(word)).map(stem);
}

function count(list) {
  const found = new Map();
  for (const word of list) found.set(word, (found.get(word) || 0) + 1);
  return found;
}

let index = null;

function build(sections) {
  const rows = sections.map((section) => {
    const title = words(section.title), page = words(section.page), text = words(section.text);
    const counts = count([...text, ...Array(6).fill(title).flat(), ...page, ...page]);
    return {section, counts, length: text.length + 20};
  });
  const having = new Map();
  for (const row of rows) for (const word of row.counts.keys()) having.set(word, (having.get(word) || 0) + 1);
  return {rows, having, mean: rows.reduce((sum, row) => sum + row.length, 0) / rows.length};
}

function rank(sections, question) {
  index = index || build(sections);
  const asked = [...new Set(words(question))], pages = new Map();
  for (const row of index.rows) {
    let score = 0, matched = 0;
    for (const word of asked) {
      const times = row.counts.get(word) || 0;
      if (!times) continue;
      const rare = Math.log(1 + index.rows.length / index.having.get(word));
      score += rare * times * 2.2 / (times + 1.2 * (0.4 + 0.6 * row.length / index.mean));
      matched += 1;
    }
    if (!matched) continue;
    const page = row.section.url.split("#")[0];
    score *= Math.pow(matched / asked.length, 2) * (LATER.test(page) ? 0.5 : 1);
    const best = pages.get(page);
    if (!best) pages.set(page, {section: row.section, score, best: score});
    else {
      best.score += score / 10;
      if (score > best.best) Object.assign(best, {section: row.section, score: best.score - best.best + score, best: score});
    }
  }
  return [...pages.values()].sort((one, other) => other.score - one.score).slice(0, 12);
}

function excerpt(text, question) {
  const asked = new Set(words(question)), flat = text.replace(/\s+/g, " ").trim();
  const parts = flat.split(/(?<=[.:;]) /);
  let best = 0, most = -1;
  parts.forEach((part, at) => {
    const found = new Set(words(part).filter((word) => asked.has(word))).size;
    if (found > most) [best, most] = [at, found];
  });
  const cut = parts.slice(best).join(" ");
  return cut.length > 240 ? cut.slice(0, 240).replace(/ \S*$/, "") + " …" : cut;
}

function show() {
  const question = new URLSearchParams(location.search).get("q") || "", place = document.getElementById("search-results");
  const found = rank(SECTIONS, question);
  const head = document.createElement("h1");
  head.textContent = found.length ? `Pages about “${question}”` : `Nothing is said of “${question}”`;
  place.replaceChildren(head);
  for (const {section} of found) {
    const row = document.createElement("p"), link = document.createElement("a"), text = document.createElement("span");
    link.href = section.url;
    link.textContent = section.title === section.page ? section.page : `${section.page}: ${section.title}`;
    text.textContent = excerpt(section.text, question);
    row.append(link, document.createElement("br"), text);
    place.append(row);
  }
}
