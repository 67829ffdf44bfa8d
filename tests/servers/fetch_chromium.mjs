// Installs npm's packages into $CHROMIUM_FOLDER and unpacks the browser that one of them holds, compressed, with the
// libraries and fonts that it needs where the system has none. Nothing in the packages is run.
//
//     node fetch_chromium.mjs @sparticuz/chromium@VERSION axe-core@VERSION

import { execFileSync } from "node:child_process";
import { chmodSync, createReadStream, createWriteStream, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const folder = process.env.CHROMIUM_FOLDER;
const options = ["--no-audit", "--no-fund", "--ignore-scripts", "--omit=dev", "--silent"];
execFileSync("npm", ["install", ...options, "--prefix", folder, ...process.argv.slice(2)], { stdio: "inherit" });

const packed = join(folder, "node_modules", "@sparticuz", "chromium", "bin");
const unpack = (name, file) =>
  pipeline(createReadStream(join(packed, name)), createBrotliDecompress(), createWriteStream(join(folder, file)));

await unpack("chromium.br", "chromium");
chmodSync(join(folder, "chromium"), 0o755);
for (const name of ["al2023.tar", "fonts.tar"]) {
  await unpack(`${name}.br`, name);
  execFileSync("tar", ["-xf", join(folder, name), "-C", folder], { stdio: "inherit" });
  rmSync(join(folder, name));
}
rmSync(packed, { recursive: true });
writeFileSync(
  join(folder, "fonts.conf"),
  `<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
`,
);
