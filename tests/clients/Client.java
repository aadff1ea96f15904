import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** Runs a loop of tool calls, and then streams the last answer: java Client.java URL MODEL PROMPT TOOLS. */
class Client {
    static final Pattern CALLS = Pattern.compile("\"tool_calls\":(\\[\\{.*?\"id\":\"([^\"]+)\".*?\\}\\}\\])");
    static final Pattern TEXT = Pattern.compile("\"content\":\"((?:[^\"\\\\]|\\\\.)*)\"");
    static final HttpClient client = HttpClient.newHttpClient(); // HTTP/2 by default, so it asks for an upgrade

    static HttpRequest request(String[] args, String messages, boolean stream) {
        String body = "{\"model\": \"%s\", \"temperature\": 0, \"max_tokens\": 200, \"messages\": [%s], \"tools\": %s, \"stream\": %b}";
        return HttpRequest.newBuilder(URI.create(args[0] + "/v1/chat/completions"))
            .header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(String.format(body, args[1], messages, args[3], stream)))
            .build();
    }

    static String check(HttpResponse<String> answer) {
        if (answer.statusCode() != 200) throw new IllegalStateException(answer.statusCode() + " " + answer.body());
        return answer.body();
    }

    public static void main(String[] args) throws Exception {
        String messages = "{\"role\": \"user\", \"content\": \"" + args[2].replace("\"", "\\\"") + "\"}";
        String answer = check(client.send(request(args, messages, false), HttpResponse.BodyHandlers.ofString()));
        int numCalls = 0;
        for (Matcher calls = CALLS.matcher(answer); calls.find(); calls = CALLS.matcher(answer)) {
            messages += ", {\"role\": \"assistant\", \"tool_calls\": " + calls.group(1) + "}";
            messages += ", {\"role\": \"tool\", \"tool_call_id\": \"" + calls.group(2) + "\", \"content\": \"result " + ++numCalls + "\"}";
            answer = check(client.send(request(args, messages, false), HttpResponse.BodyHandlers.ofString()));
        }
        TEXT.matcher(answer).results().forEach(found -> System.out.println(found.group(1)));
        client.send(request(args, messages, true), HttpResponse.BodyHandlers.ofLines()).body()
            .flatMap(line -> TEXT.matcher(line).results()).forEach(found -> System.out.print(found.group(1)));
    }
}
