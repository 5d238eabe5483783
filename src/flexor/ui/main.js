"use strict";
// The end of all scripts: every part has named its tab.

startApplication();
