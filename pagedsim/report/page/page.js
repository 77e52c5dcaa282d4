// The page with hands: charts, tables, a replay. Without scripts it is whole, but still.

import { charts } from "./charts.js";
import { replay } from "./replay.js";
import { legend } from "./shown.js";
import { tables } from "./tables.js";

legend(document.querySelector("main > h2"));
tables();
replay();
charts();
