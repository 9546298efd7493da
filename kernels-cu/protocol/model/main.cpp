/* Runs the model checks:
 *   model PROTOCOL [CHECK]
 * It runs the litmus tests, then every check (or the named one). Then it weakens one memory order after the other
 * and runs the checks until one fails. An order that can be weakened without a failing check must be listed below,
 * with the reason. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "model/model.h"

namespace mpk {
namespace model {

uint32_t run_litmus();

namespace {

/* A line of the source with an acquire, a release, or system scope. */
struct Annotation {
  std::string path; /* relative to the protocol's folder */
  Site site;
  std::string text; /* the line */
  bool orders, system;
};

struct NotShown {
  bool scope; /* the entry is about the scope, not the order */
  const char* file;
  const char* text; /* part of the line */
  const char* reason;
};

/* Orders and scopes that stay as they are although no check fails without them. */
constexpr NotShown kNotShown[] = {
    {true, "trace.h", "platform::store<platform::Scope::kSystem>(&rank->trace_count[row], count + 1", "the timeline is for the host; no step reads it"},
    {false, "entry.cpp", "&rank->control->running, ~0u", "hosts join the threads, and then look at it; none does so while they run"},
    {true, "entry.cpp", "&rank->control->running", "likewise"},
    {true, "wait.h", "platform::store<platform::Scope::kSystem>(field, value", "the status is for the host's report; no step reads it"},
    {true, "batch_step.h", "platform::kRelaxed", "figures for the host; no step reads them"},
    {true, "wait.h", "rank->host_abort", "a word of the host; no check has one"},
    {true, "proxy.cpp", "inbox->abort, word", "likewise"},
    {true, "frames.h", "rank->control->abort", "no check aborts a rank that waits for room"},
    {true, "event.h", "fetch_add<platform::Scope::kSystem>(event_counter(graph, index), times", "one rank alone: the device's scope would do there"},
};

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

/* Removes comments from a line. */
std::string code_of(const std::string& line, bool* in_comment) {
  std::string code;
  for (size_t i = 0; i < line.size(); ++i) {
    if (*in_comment) {
      if (line.compare(i, 2, "*/") == 0) *in_comment = false, ++i;
    } else if (line.compare(i, 2, "/*") == 0) {
      *in_comment = true, ++i;
    } else if (line.compare(i, 2, "//") == 0) {
      break;
    } else {
      code += line[i];
    }
  }
  return code;
}

void read_annotations(const std::string& folder, const std::string& path, std::vector<Annotation>* found) {
  FILE* file = fopen((folder + "/" + path).c_str(), "r");
  if (file == nullptr) {
    fprintf(stderr, "model: %s/%s cannot be read\n", folder.c_str(), path.c_str());
    exit(2);
  }
  char buffer[1000];
  bool in_comment = false, in_system = false;
  for (int line = 1; fgets(buffer, sizeof(buffer), file) != nullptr; ++line) {
    const std::string code = code_of(buffer, &in_comment);
    if (code.find("#define") != std::string::npos || code.find("order") != std::string::npos) continue;
    const bool orders = code.find("kAcquire") != std::string::npos || code.find("kRelease") != std::string::npos;
    /* The scope belongs to the order of its operation, which may be on the next line. */
    in_system |= code.find("Scope::kSystem>") != std::string::npos;
    const bool system = in_system && (orders || code.find("kRelaxed") != std::string::npos);
    if (system) in_system = false;
    if (!orders && !system) continue;
    const size_t first = code.find_first_not_of(" \t");
    found->push_back({path, Site{path.substr(path.find_last_of('/') + 1), line}, code.substr(first, code.find_last_not_of(" \t\r\n") + 1 - first), orders, system});
  }
  fclose(file);
}

/* The steps, the CPU target's loops, and the checker's platform. */
std::vector<std::string> sources(const std::string& folder) {
  std::vector<std::string> found = {"model/platform.h"};
  for (const char* part : {"", "cpu/"}) {
    DIR* directory = opendir((folder + "/" + part).c_str());
    if (directory == nullptr) continue;
    while (const dirent* entry = readdir(directory)) {
      const std::string file = entry->d_name;
      const size_t dot = file.find_last_of('.');
      const std::string end = dot == std::string::npos ? "" : file.substr(dot);
      if (end != ".h" && end != ".cpp") continue;
      found.push_back(part + file);
    }
    closedir(directory);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/* The effect of a weakened order, or of a narrowed scope, as one line; `bad` if that is a failure of the run. */
std::string weakened(const Annotation& annotation, bool scope, const std::vector<Result>& results, bool* bad) {
  std::string text;
  for (size_t i = 0; i < results.size(); ++i) {
    if ((scope ? results[i].system_sites : results[i].sites).count(annotation.site) == 0) continue;
    Variation variation;
    (scope ? variation.narrowed : variation.weakened) = &annotation.site;
    /* Almost every execution accesses a word from all the ranks that ever access it. */
    checks()[i]->options.limit = scope ? 500 : 0;
    const Result result = explore(*checks()[i], variation);
    if (result.error.empty()) continue;
    text = std::string(checks()[i]->name) + ": " + first_line(result.error);
    if (getenv("MPK_MODEL_TRACE") != nullptr) text += "\n" + result.error.substr(result.error.find('\n') + 1);
    break;
  }
  const NotShown* reason = nullptr;
  for (const NotShown& entry : kNotShown)
    if (entry.scope == scope && annotation.site.file == entry.file && annotation.text.find(entry.text) != std::string::npos) reason = &entry;
  *bad = text.empty() == (reason == nullptr);
  if (text.empty()) text = reason != nullptr ? std::string("not shown: ") + reason->reason : "NO CHECK FAILS";
  else if (reason != nullptr) text += " (but it is listed as not shown)";
  return annotation.path + ":" + std::to_string(annotation.site.line) + "  " + text;
}

int run(const std::string& folder, const char* only) {
  const double start = seconds();
  const uint32_t litmus = run_litmus();
  if (litmus == 0) return 1;
  printf("%u litmus tests\n", litmus);

  std::sort(checks().begin(), checks().end(), [](const Check* a, const Check* b) { return strcmp(a->name, b->name) < 0; });
  if (only != nullptr) {
    std::vector<Check*>& all = checks();
    all.erase(std::remove_if(all.begin(), all.end(), [only](const Check* c) { return strstr(c->name, only) == nullptr; }), all.end());
  }
  std::vector<Result> results;
  for (Check* check : checks()) {
    check->options.distinct = true;
    const double began = seconds();
    results.push_back(explore(*check, {}));
    const Result& result = results.back();
    printf("%-44s %8llu executions, %7llu ended in waits, %8llu begun, %6.2f s%s\n", check->name, static_cast<unsigned long long>(result.complete),
           static_cast<unsigned long long>(result.waiting), static_cast<unsigned long long>(result.begun), seconds() - began, result.limited ? " (limited)" : check->options.must_fail != nullptr ? " (fails, as it must)" : "");
    fflush(stdout);
    if (const char* expected = check->options.must_fail) {
      if (result.error.find(expected) == std::string::npos) {
        fprintf(stderr, "%s: must fail (%s), but does not: %s\n", check->name, expected, result.error.c_str());
        return 1;
      }
      results.back().sites.clear(); /* weaker orders would add nothing */
      continue;
    }
    if (!result.error.empty() || result.complete == 0) {
      fprintf(stderr, "%s: %s\n", check->name, result.error.empty() ? "no execution comes to its end" : result.error.c_str());
      return 1;
    }
    check->options.distinct = false;
    /* The checker's own test: the order in which threads take turns must not matter. */
    if (result.begun > (getenv("MPK_MODEL_LONG") != nullptr ? 1000000u : 5000u)) continue;
    const uint64_t reversed = explore(*check, {.reversed = true}).complete;
    if (reversed != result.complete) {
      fprintf(stderr, "%s: %llu executions, but %llu with threads in reverse\n", check->name, static_cast<unsigned long long>(result.complete),
              static_cast<unsigned long long>(reversed));
      return 1;
    }
  }

  std::vector<Annotation> annotations;
  for (const std::string& path : sources(folder)) read_annotations(folder, path, &annotations);
  /* Each process takes every n-th order. */
  const uint32_t processes = 2;
  FILE* pipes[processes];
  pid_t children[processes];
  fflush(stdout);
  for (uint32_t p = 0; p < processes; ++p) {
    int ends[2];
    if (pipe(ends) != 0) return 3;
    children[p] = fork();
    if (children[p] < 0) return 3;
    if (children[p] == 0) {
      close(ends[0]);
      FILE* out = fdopen(ends[1], "w");
      int code = 0;
      for (size_t i = p; i < annotations.size(); i += processes) {
        bool bad = false;
        if (annotations[i].orders) fprintf(out, "  order  %s\n", weakened(annotations[i], false, results, &bad).c_str());
        if (bad && only == nullptr) code = 1;
        if (annotations[i].system) fprintf(out, "  scope  %s\n", weakened(annotations[i], true, results, &bad).c_str());
        if (bad && only == nullptr) code = 1;
      }
      fclose(out);
      _exit(code);
    }
    close(ends[1]);
    pipes[p] = fdopen(ends[0], "r");
  }
  printf("weakened to relaxed, or from the system's scope to the device's, one at a time:\n");
  int code = 0;
  char line[2000];
  for (uint32_t p = 0; p < processes; ++p) {
    while (fgets(line, sizeof(line), pipes[p]) != nullptr) fputs(line, stdout);
    fclose(pipes[p]);
    int status = 0;
    waitpid(children[p], &status, 0);
    if (status != 0) code = 1;
  }
  size_t orders = 0, scopes = 0;
  for (const Annotation& annotation : annotations) orders += annotation.orders, scopes += annotation.system;
  printf("%zu memory orders, %zu scopes, %.1f s\n", orders, scopes, seconds() - start);
  if (code != 0) fprintf(stderr, "model: an order or a scope is not shown to be needed; see above\n");
  return code;
}

}  // namespace
}  // namespace model
}  // namespace mpk

int main(int count, char** arguments) {
  if (count != 2 && count != 3) {
    fprintf(stderr, "usage: model PROTOCOL [CHECK]\n");
    return 2;
  }
  return mpk::model::run(arguments[1], count == 3 ? arguments[2] : nullptr);
}
