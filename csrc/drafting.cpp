// What the draft policy does for every request and draft token. Meaning, and the same in Python:
// `choose` in slipstream/engine/drafting/choice.py, `learn` in acceptance.py.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "bindings.h"

namespace slipstream {

namespace nb = nanobind;

namespace {

// The constants of acceptance.py and traffic.py.
constexpr double memory = 0.1, traffic_memory = 0.02, bin_memory = 0.01, luck = 0.25;
constexpr double most_factor = 1.5, stopped = 0.5;
constexpr int64_t prior_trials = 2, known_trials = 6, many = 64, many_in_bin = 100;
constexpr double factor_parts = 8;

PyObject* checked(PyObject* found) {
    if (!found) throw nb::python_error();
    return found;
}

// The attributes that are read of every request, by names that are looked up once.
struct Name {
    PyObject* text;
    explicit Name(const char* name) : text(checked(PyUnicode_InternFromString(name))) {}
    nb::object of(nb::handle owner) const {
        return nb::steal(checked(PyObject_GetAttr(owner.ptr(), text)));
    }
    int64_t whole(nb::handle owner) const { return nb::cast<int64_t>(of(owner)); }
    double real(nb::handle owner) const { return nb::cast<double>(of(owner)); }
    void set(nb::handle owner, nb::handle value) const {
        if (PyObject_SetAttr(owner.ptr(), text, value.ptr())) throw nb::python_error();
    }
};

struct Names {
    Name request{"request"}, stops{"stops"}, trim{"trim"}, num_draft_tokens{"num_draft_tokens"},
        num_accepted{"num_accepted"}, confidences{"confidences"}, probed{"probed"},
        traffic{"traffic"}, chances{"chances"}, num_results{"num_results"}, factor{"factor"},
        has_drafted{"has_drafted"}, rates{"rates"}, results_by_bin{"results_by_bin"},
        append{"append"};
};

nb::object item_of(nb::handle sequence, int64_t index) {
    return nb::steal(checked(PySequence_GetItem(sequence.ptr(), index)));
}

// A list of numbers.
struct Numbers {
    nb::object list;
    explicit Numbers(nb::object given) : list(std::move(given)) {
        if (!PyList_Check(list.ptr())) throw nb::type_error("numbers are not in a list");
    }
    double operator[](int64_t index) const {
        const double found = PyFloat_AsDouble(checked(PyList_GetItem(list.ptr(), index)));
        if (found == -1.0 && PyErr_Occurred()) throw nb::python_error();
        return found;
    }
    int64_t size() const { return PyList_GET_SIZE(list.ptr()); }
    void set(int64_t index, PyObject* value) {
        if (PyList_SetItem(list.ptr(), index, checked(value))) throw nb::python_error();
    }
    void move(int64_t index, double weight, double to) {
        const double before = (*this)[index];
        set(index, PyFloat_FromDouble(before + weight * (to - before)));
    }
    // The weight of one more result, whose number is counted up to a limit.
    double count(int64_t index, int64_t most, double least) {
        const int64_t known = static_cast<int64_t>((*this)[index]) + 1;
        if (known > most) return least;
        set(index, PyLong_FromLongLong(known));
        return std::max(least, 1.0 / static_cast<double>(known + prior_trials));
    }
};

double own_weight(int64_t trials) {
    const double number = static_cast<double>(trials);
    return number * memory < 1 ? 1 / number : memory;
}

// What is known of the traffic of a request.
struct Traffic {
    nb::object owner;
    Numbers chances, num_results, rates, results_by_bin;
    Traffic(const Names& names, const nb::object& traffic)
        : owner(traffic),
          chances(names.chances.of(traffic)),
          num_results(names.num_results.of(traffic)),
          rates(names.rates.of(traffic)),
          results_by_bin(names.results_by_bin.of(traffic)) {}
};

// A draft of one request.
struct Chain {
    const Names& names;
    nb::handle history;
    Traffic& traffic;
    Numbers chances;
    int64_t judged, accepted, num_results;

    double verdict(int64_t place) const { return place < accepted ? 1.0 : 0.0; }

    void learn_confidences(nb::handle confidences, int64_t places, nb::handle recent) {
        const int64_t last = traffic.rates.size() - 1;
        double factor = names.factor.real(history);
        const double rounded = std::abs(factor - 1) < luck
                                   ? 1.0
                                   : std::nearbyint(factor * factor_parts) / factor_parts;
        const nb::object chain = nb::make_tuple(confidences, rounded, traffic.owner);
        nb::steal(checked(PyObject_CallMethodOneArg(recent.ptr(), names.append.text, chain.ptr())));
        const double weight = own_weight(std::max<int64_t>(0, num_results) + prior_trials);
        const int64_t length = std::min(static_cast<int64_t>(nb::len(confidences)), places);
        for (int64_t place = 0; place < length; ++place) {
            const double confidence = nb::cast<double>(item_of(confidences, place));
            const int64_t bin =
                confidence < 1.0 ? static_cast<int64_t>(confidence * (last + 1)) : last;
            const double by_table = traffic.rates[bin];
            chances.move(place, weight, std::min(1.0, by_table * rounded));
            if (place >= judged) continue;
            const double predicted = std::min(1.0, by_table * factor);
            traffic.rates.move(bin, traffic.results_by_bin.count(bin, many_in_bin, bin_memory),
                               verdict(place));
            factor += memory * (verdict(place) - predicted);
            factor = std::min(most_factor, std::max(0.0, factor));
        }
        names.factor.set(history, nb::float_(factor));
    }

    void learn_verdicts(double weight) {
        for (int64_t place = 0; place < judged; ++place) {
            chances.move(place, weight, verdict(place));
            const double in_all = traffic.num_results.count(place, many, traffic_memory);
            traffic.chances.move(place, in_all, verdict(place));
        }
    }
};

// Learn from the chains of requests `index`, `index + stride`, .. of a step, up to the first that
// has ended or is `examined`. Returns its index, or one past the last. Results of probes are added to
// `probes`.
int64_t learn(nb::dict histories, nb::handle items, nb::handle gains, nb::handle live,
              int64_t index, int64_t stride, int64_t examined, int64_t places, nb::handle recent,
              nb::list probes) {
    static const Names names;
    const int64_t past = static_cast<int64_t>(nb::len(items));
    std::optional<Traffic> traffic;
    for (; index < past && index != examined; index += stride) {
        const nb::object item = item_of(items, index), gain = item_of(gains, index);
        if (!nb::cast<bool>(item_of(live, index))) return index;
        const int64_t drafted = names.num_draft_tokens.whole(gain),
                      accepted = names.num_accepted.whole(gain);
        const bool stops = drafted == accepted && !names.stops.of(item).is_none();
        if (!drafted && !stops && names.trim.of(item).is_none()) continue;
        PyObject* found =
            PyDict_GetItemWithError(histories.ptr(), names.request.of(item).ptr());
        if (!found && PyErr_Occurred()) throw nb::python_error();
        if (!found) continue;
        const nb::object history = nb::borrow(found);
        const nb::object owner = names.traffic.of(history);
        if (!traffic || !traffic->owner.is(owner)) traffic.emplace(names, owner);
        Chain chain{names,
                    history,
                    *traffic,
                    Numbers(names.chances.of(history)),
                    std::min({accepted + 1, drafted, places}),
                    accepted,
                    names.num_results.whole(history)};
        const bool is_known = traffic->num_results[0] >= many;
        const int64_t prior = is_known ? known_trials : prior_trials;
        const int64_t probed = names.probed.whole(history);
        if (probed && drafted >= probed) {
            const int64_t gained = std::max<int64_t>(0, accepted - (probed - 1));
            probes.append(gained);
            if (gained) chain.num_results = prior_trials - prior;
            names.probed.set(history, nb::int_(0));
        }
        double weight = own_weight(chain.num_results + prior);
        const nb::object confidences = names.confidences.of(gain);
        if (nb::len(confidences)) {
            chain.learn_confidences(confidences, places, recent);
            weight /= 2;
        }
        if (stops && chain.judged == accepted && drafted < names.num_draft_tokens.whole(item) &&
            (!drafted || nb::len(confidences)))  // the next token was not drafted
            chain.chances.move(accepted, stopped * weight, 0.0);
        names.num_results.set(history, nb::int_(chain.num_results + 1));
        names.has_drafted.set(history, nb::bool_(true));
        chain.learn_verdicts(weight);
    }
    return index;
}

// The survival of each draft token, 0 beyond a request's bound. The chances at the first places are
// shrunk towards their mean.
std::vector<std::vector<double>> gains_of(std::vector<std::vector<double>> chances,
                                          const std::vector<int64_t>& bounds, size_t drawn_places,
                                          double noise) {
    if (chances.empty() || chances.size() != bounds.size())
        throw nb::value_error("there is no request, or one without a bound");
    const double requests = static_cast<double>(chances.size());
    for (size_t place = 0; place < drawn_places && place < chances[0].size(); ++place) {
        double mean = 0.0, spread = 0.0;
        for (const auto& row : chances) mean += row.at(place) / requests;
        for (const auto& row : chances) spread += (row[place] - mean) * (row[place] - mean);
        const double by_chance = mean * (1 - mean) * noise;
        const double share = by_chance * requests < spread ? by_chance * requests / spread : 1.0;
        for (auto& row : chances) row[place] += share * (mean - row[place]);
    }
    for (size_t request = 0; request < chances.size(); ++request) {
        double survival = 1.0;
        int64_t place = 0;
        for (double& chance : chances[request]) {
            survival = place++ < bounds[request] ? survival * chance : 0.0;
            chance = survival;
        }
    }
    return chances;
}

// (width, units of each request, smallest gain taken, expected tokens, seconds)
nb::tuple choose(const std::vector<std::vector<double>>& gains, const std::vector<int64_t>& widths,
                 nb::handle table, double least_gain, double least_survival) {
    if (gains.empty()) throw nb::value_error("there is no request");
    const int64_t requests = static_cast<int64_t>(gains.size());
    std::vector<double> flat;  // by place, then by request
    for (size_t place = 0; place < gains[0].size(); ++place)
        for (const std::vector<double>& row : gains) flat.push_back(row.at(place));
    std::vector<int64_t> order;
    for (size_t index = 0; index < flat.size(); ++index)
        if (flat[index] > least_survival) order.push_back(static_cast<int64_t>(index));
    const int64_t longest = order.empty() ? 0 : 1 + order.back() / requests;
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t left, int64_t right) { return flat[left] > flat[right]; });
    // The added time of each unit, by its number among those chosen at its position.
    std::vector<Numbers> passes;
    for (int64_t place = 1; place <= longest; ++place)
        passes.emplace_back(table.attr("added")(place));
    std::vector<int64_t> numbers(passes.size());
    std::vector<double> added;
    for (int64_t index : order) {
        const int64_t place = index / requests;
        added.push_back(passes[place][++numbers[place]]);
    }

    const double least = nb::cast<double>(table.attr("least"));
    double tokens = static_cast<double>(requests), seconds = nb::cast<double>(table.attr("plain")),
           speed = least_gain * tokens / seconds, smallest = 1.0;
    int64_t width = 0;
    size_t taken = 0;
    for (size_t at = 1; at < widths.size() && widths[at - 1] < longest; ++at) {
        const int64_t first = widths[at - 1] * requests, end = widths[at] * requests;
        const int64_t most = std::count_if(order.begin(), order.end(),
                                           [&](int64_t index) { return index < end; });
        const Numbers targets(table.attr("targets")(most, widths[at]));
        double gained = static_cast<double>(requests),
               drafting = nb::cast<double>(table.attr("padded_drafting")(widths[at]));
        bool is_wider = false;  // choices that fit into a narrower step are considered there
        int64_t number = 0;
        for (size_t rank = 0; rank < order.size(); ++rank) {
            if (order[rank] >= end) continue;
            gained += flat[order[rank]];
            drafting += added[rank];
            is_wider |= order[rank] >= first;
            const double spent = std::max(least, targets[++number] + drafting);
            if (!is_wider || !(gained / spent > speed)) continue;
            tokens = gained, seconds = spent, speed = gained / spent;
            smallest = flat[order[rank]], width = widths[at], taken = rank + 1;
        }
    }
    std::vector<int64_t> counts(gains.size());
    for (size_t rank = 0; rank < taken; ++rank)
        if (order[rank] < width * requests) ++counts[order[rank] % requests];
    if (nb::cast<bool>(table.attr("exact")))
        width = *std::max_element(counts.begin(), counts.end());
    return nb::make_tuple(width, counts, smallest, tokens, seconds);
}

}  // namespace

void bind_drafting(nb::module_& module) {
    module.def("learn_drafts", learn, nb::arg("histories"), nb::arg("items"),
               nb::arg("gains"), nb::arg("live"), nb::arg("index"), nb::arg("stride"),
               nb::arg("examined"), nb::arg("places"), nb::arg("recent"),
               nb::arg("probes"));
    module.def("draft_gains", gains_of, nb::arg("chances"), nb::arg("bounds"),
               nb::arg("drawn_places"), nb::arg("noise"));
    module.def("choose_drafts", choose, nb::arg("gains"), nb::arg("widths"),
               nb::arg("table"), nb::arg("least_gain"), nb::arg("least_survival"));
}

}  // namespace slipstream
